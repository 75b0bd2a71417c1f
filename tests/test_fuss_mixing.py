"""Training mixtures of a FUSS folder."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from test_distributed import N_EXAMPLES, write_fuss

from separator.errors import SeparatorError
from separator.fuss_mixing import FussMixtures, RemixConfig

PLAIN = RemixConfig(seconds=0.75, exchange=0.0, gain_db=0.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FussMixtures:
    return FussMixtures(write_fuss(tmp_path_factory.mktemp("fuss")))


def batches(data: FussMixtures, mixing: RemixConfig = PLAIN, rows: slice = slice(None), size: int = 4):
    return data.batches(mixing, batch_size=size, n_batches=50, seed=1, rows=rows)


def test_an_epoch_takes_every_example_once_across_batches(data):
    drawn = batches(data)
    seen = [drawn.example_of(index, row) for index in range(10) for row in range(4)]
    for epoch in range(4):
        assert sorted(seen[epoch * N_EXAMPLES : (epoch + 1) * N_EXAMPLES]) == list(range(N_EXAMPLES))
    assert seen[:N_EXAMPLES] != seen[N_EXAMPLES : 2 * N_EXAMPLES]


def test_processes_share_a_batch_without_repeats(data):
    mixing = RemixConfig(seconds=0.5, reverberant=0.5)
    whole = batches(data, mixing)[7]
    parts = [batches(data, mixing, slice(start, start + 2))[7] for start in (0, 2)]
    for name in ("mixture", "sources", "active"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_without_changes_the_examples_come_as_they_are(data):
    drawn = batches(data)
    batch = drawn[0]
    for row in range(4):
        example = drawn.examples[drawn.example_of(0, row)]
        count = len(example.sources)
        assert torch.equal(batch["sources"][row, :count], example.sources)
        assert batch["active"][row].tolist() == [k < count for k in range(4)]
        assert torch.allclose(batch["mixture"][row], example.sources.sum(0), atol=1e-7)


def test_exchanged_sources_keep_the_count(data):
    counts = [
        Counter(int(n) for index in range(8) for n in batches(data, mixing)[index]["active"].sum(1))
        for mixing in (PLAIN, RemixConfig(seconds=0.75, exchange=1.0))
    ]
    assert counts[0] == counts[1]
    plain, remixed = (
        batches(data, mixing)[0]["sources"] for mixing in (PLAIN, RemixConfig(seconds=0.75, exchange=1.0))
    )
    assert not torch.allclose(plain, remixed)


def test_gains_stay_within_their_range(data):
    mixing = RemixConfig(seconds=0.75, exchange=0.0, gain_db=6.0)
    plain, louder = (batches(data, m)[2]["sources"].square().sum(-1) for m in (PLAIN, mixing))
    change = 10 * torch.log10(louder[plain > 0] / plain[plain > 0])
    assert change.abs().max() <= 6.0
    assert change.std() > 1.0


def test_short_stretches_always_hold_a_source(data):
    drawn = batches(data, RemixConfig(seconds=0.01))
    assert all(drawn[index]["active"].any(1).all() for index in range(20))


def test_validation_mixtures_are_the_same_every_time(data):
    first, second = (list(data.validation(PLAIN, 3)) for _ in range(2))
    assert len(first) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_folder_without_the_split_is_refused(tmp_path: Path):
    with pytest.raises(SeparatorError, match="train"):
        FussMixtures(tmp_path).batches(PLAIN, batch_size=4, n_batches=1, seed=0, rows=slice(None))
