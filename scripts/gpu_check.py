"""Check whether a framework of this Python runs on this machine's GPUs: exit 0, or 1 and why not.

    python scripts/gpu_check.py paddle|torch

Importing a package is not enough: one built for older GPUs imports well and fails at the first
kernel. So this multiplies two matrices on the GPU.
"""

import sys


def reason_against_paddle() -> str:
    """Return why Paddle cannot use a GPU here; "" when it can."""
    try:
        import paddle
    except ImportError as error:
        return f"no Paddle: {error}"
    if not paddle.is_compiled_with_cuda():
        return f"Paddle {paddle.__version__} here is the CPU build"
    try:
        paddle.set_device("gpu:0")
        ones = paddle.ones([64, 64])
        total = float(paddle.matmul(ones, ones).sum())
    except (RuntimeError, OSError, ValueError) as error:
        return f"Paddle {paddle.__version__} does not run on this GPU: {str(error)[-300:]}"
    return "" if total == 64.0**3 else f"a matrix product on the GPU is wrong: {total:g}"


def reason_against_torch() -> str:
    """Return why PyTorch cannot use a GPU here; "" when it can."""
    try:
        import torch
    except ImportError as error:
        return f"no PyTorch: {error}"
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} here is the CPU build"
    try:
        ones = torch.ones(64, 64, device="cuda:0")
        total = float((ones @ ones).sum())
    except (RuntimeError, AssertionError) as error:
        return f"PyTorch {torch.__version__} does not run on this GPU: {str(error)[-300:]}"
    return "" if total == 64.0**3 else f"a matrix product on the GPU is wrong: {total:g}"


if __name__ == "__main__":
    checks = {"paddle": reason_against_paddle, "torch": reason_against_torch}
    if sys.argv[1:2] == [] or sys.argv[1] not in checks:
        sys.exit("usage: gpu_check.py paddle|torch")
    reason = checks[sys.argv[1]]()
    if reason:
        print(reason)
    sys.exit(1 if reason else 0)
