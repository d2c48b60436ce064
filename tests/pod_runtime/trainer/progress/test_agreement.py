import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pod_runtime.trainer.progress.agreement import (
    HALTS,
    HEADER_SIZE,
    MUST,
    AgreedCut,
    ExchangeResult,
    SnapshotRequest,
    alone,
    make_ballot,
    make_comparison,
    make_header,
    read_ballots,
    read_comparison,
    read_header,
)

rank_states = st.lists(
    st.tuples(
        st.booleans(),
        st.booleans(),
        st.integers(0, 4096),
        st.builds(SnapshotRequest, snapshot=st.sampled_from([0.0, MUST]), renew=st.booleans()),
    ),
    min_size=1,
    max_size=64,
)


@given(rank_states)
def test_a_header_says_whether_any_rank_was_told_even_summed_in_float32(ranks):
    total = np.zeros(HEADER_SIZE, np.float32)
    for cut, void, samples, request in ranks:
        header = make_header(cut=cut, void=void, samples=samples, request=request)
        total += np.array(header, np.float32)
    assert read_header(total.tolist()) == ExchangeResult(
        cut=any(cut for cut, _, _, _ in ranks),
        void=any(void for _, void, _, _ in ranks),
        samples=sum(samples for _, _, samples, _ in ranks),
        request=SnapshotRequest(
            snapshot=max(request.snapshot for *_, request in ranks),
            renew=any(request.renew for *_, request in ranks),
        ),
    )


@given(
    st.fixed_dictionaries(
        {
            "cut": st.booleans(),
            "void": st.booleans(),
            "samples": st.integers(0, 4096),
            "request": st.builds(
                SnapshotRequest, snapshot=st.sampled_from([0.0, 1.0, MUST]), renew=st.booleans()
            ),
            "patient": st.booleans(),
            "drawn": st.none() | st.integers(0, 2**64 - 1),
            "stops": st.booleans(),
        }
    )
)
def test_a_rank_that_is_alone_comes_to_what_its_header_says(mine):
    assert alone(**mine) == read_header(make_header(**mine))


@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 1 << 40), st.booleans(), st.sampled_from(HALTS)),
        min_size=1,
        max_size=20,
    )
)
def test_ranks_agree_on_the_newest_cut_that_any_of_them_knows(known):
    world_size = len(known)
    total = np.zeros(len(make_ballot(0, world_size, None, False)))
    for rank, (cut_id, durable, halt) in enumerate(known):
        total += make_ballot(rank, world_size, cut_id, durable, halt)
    told = [each for each in known if each[0] is not None]
    agreed = read_ballots(total.tolist())
    if not told:
        assert agreed is None
    else:
        newest = max(cut_id for cut_id, _durable, _halt in told)
        assert agreed == AgreedCut(
            id=newest,
            durable=any(durable for _id, durable, _halt in told),
            halt=max((halt for cut_id, _, halt in told if cut_id == newest), key=HALTS.index),
        )


@given(st.integers(1, 500))
def test_a_snapshot_that_nobody_needs_is_made_when_no_node_minds(nodes):
    header = np.array(
        make_header(cut=False, void=False, samples=1, request=SnapshotRequest(snapshot=1 / nodes))
    )
    total = np.zeros(HEADER_SIZE, np.float32)
    for _ in range(nodes - 1):
        total += header.astype(np.float32)
    assert read_header(total.tolist()).request.snapshot == 0.0
    total += header.astype(np.float32)
    assert read_header(total.tolist()).request.snapshot == 1.0


@given(
    st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=8),
    st.integers(2, 200),
    st.data(),
)
def test_ranks_see_the_first_number_that_one_of_them_has_another(values, world_size, data):
    same = make_comparison(values) * world_size
    assert read_comparison(same, world_size) is None
    index = data.draw(st.integers(0, len(values) - 1))
    other = [*values]
    other[index] = values[index] * 1.01 + 1e-30
    apart = same - make_comparison(values) + make_comparison(other)
    if abs(values[index]) > 1e-3:
        assert read_comparison(apart, world_size) == index


def test_numbers_that_are_none_or_differ_by_rounding_are_the_same():
    nothing = [float("nan"), float("inf"), 1e-200]
    assert read_comparison(make_comparison([*nothing, 1.0]) * 2, 2) is None
    close = make_comparison([1.0, 4294967295.0]) + make_comparison([1.0 + 1e-9, 4294967295.0])
    assert read_comparison(close, 2) is None
    apart = make_comparison([1.0, 4294967295.0]) + make_comparison([1.0 + 1e-5, 4294967295.0])
    assert read_comparison(apart, 2) == 0


def test_all_ranks_hear_that_the_script_of_one_ends_the_training():
    headers = [
        make_header(cut=False, void=False, samples=1, request=SnapshotRequest(), stops=rank == 2)
        for rank in range(3)
    ]
    assert read_header(np.sum(headers, axis=0).tolist()).stops
    assert not read_header(headers[0]).stops
