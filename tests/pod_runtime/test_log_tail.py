"""Logs that are cut."""

from pod_runtime.log_tail import cut_log, read_tail


def test_a_log_that_is_too_long_moves_aside_and_its_writer_goes_on(tmp_path):
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"one\ntwo\n")
        assert not cut_log(path, limit=8)
        writer.write(b"three\n")
        noted = path.stat().st_size
        assert cut_log(path, limit=8)
        assert path.read_bytes() == b""
        writer.write(b"four\n")
    assert (tmp_path / "log.1").read_bytes() == b"one\ntwo\nthree\n"
    assert read_tail(path, noted) == ["four"], "though its size was noted before the cut"
    assert cut_log(path, limit=4)
    assert (tmp_path / "log.1").read_bytes() == b"four\n", "one older part stays"
