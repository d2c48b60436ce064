"""Check whether this Python's Paddle runs on this machine's GPUs: exit 0, or 1 and the reason.

Importing a package is not enough: a Paddle built for older GPUs imports well and fails at the
first kernel. So this multiplies two matrices on the GPU.
"""

import sys


def reason_against() -> str:
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


if __name__ == "__main__":
    reason = reason_against()
    if reason:
        print(reason)
    sys.exit(1 if reason else 0)
