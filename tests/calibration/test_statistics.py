"""Sums against two-pass references, and that they add."""

from pathlib import Path

import pytest
import torch

import corp
from corp.calibration.grams import CAUSAL_BLOCKS, Grams
from corp.calibration.moments import ACTIVE_EPS, Moments
from corp.calibration.settings import Settings
from corp.calibration.site_sums import Entry, SiteSums, entry_of, read_sums, stored, write_sums
from corp.calibration.tokens import choose_tokens, real_tokens
from corp.errors import StatisticsError
from corp.numerics.linalg import unpack
from tests.helpers import decoders


def moments_of(*parts: torch.Tensor) -> Moments:
    moments = Moments(parts[0].shape[1])
    for part in parts:
        moments.update(part)
    return moments


def assert_two_pass(moments: Moments, x: torch.Tensor, rtol: float) -> None:
    x = x.double()
    centred = x - x.mean(0)
    cov = centred.T @ centred / len(x)
    torch.testing.assert_close(moments.mean, x.mean(0), rtol=rtol, atol=rtol * float(x.abs().max()))
    torch.testing.assert_close(moments.cov(), cov, rtol=rtol, atol=rtol * float(cov.abs().max()))
    torch.testing.assert_close(moments.energy, x.square().mean(0), rtol=max(rtol, 1e-7), atol=0)
    torch.testing.assert_close(moments.active_share, (x.abs() > ACTIVE_EPS).double().mean(0))


def test_streamed_moments_equal_two_passes() -> None:
    x = torch.randn(500, 1100, dtype=torch.float64).cumsum(1) / 10  # wider than two blocks, correlated
    moments = moments_of(x[:100], x[100:101], x[101:])
    assert_two_pass(moments, x, 1e-10)
    assert float(torch.linalg.eigvalsh(moments.cov()).min()) > -1e-9


def test_a_large_mean_does_not_drown_a_small_variance() -> None:
    x = (1e4 + 1e-1 * torch.randn(4000, 8)).float()
    assert_two_pass(moments_of(*x.split(500)), x, 1e-4)


def test_moments_add_whatever_their_shifts() -> None:
    x, y = torch.randn(300, 5, dtype=torch.float64), 100 + torch.randn(200, 5, dtype=torch.float64)
    assert_two_pass(moments_of(x) + moments_of(y), torch.cat([x, y]), 1e-10)
    assert_two_pass(moments_of(y) + Moments(5), y, 1e-10)


def test_moments_of_unequal_widths_do_not_add() -> None:
    with pytest.raises(StatisticsError, match="5 and of 6"):
        _ = Moments(5) + Moments(6)


def test_grams_add_single_and_folded() -> None:
    q, k = torch.randn(2, 6, 4, 2 * 3, dtype=torch.float64)
    whole, first, second, folded = Grams(2, 3), Grams(2, 3), Grams(2, 3), Grams(2, 3)
    whole.update(q, k)
    first.update(q[:2], k[:2])
    second.update(q[2:], k[2:])
    folded.update(q[2:], k[2:])
    folded.fold()
    for both in (first + second, first + folded, folded + first):
        assert both.samples == 6
        for h in range(2):
            torch.testing.assert_close(both.head(h).cross(), whole.head(h).cross())
            torch.testing.assert_close(both.head(h).energy(), whole.head(h).energy())
            torch.testing.assert_close(both.head(h, centred=True).cross(), whole.head(h, centred=True).cross())


def test_many_samples_are_folded_into_one_sum() -> None:
    grams = Grams(1, 3)
    q, k = torch.randn(2, 300, 4, 3, dtype=torch.float64)
    for i in range(300):
        grams.update(q[i : i + 1], k[i : i + 1])
    assert grams.kron is not None
    expected = sum((q[b].T @ q[b]) @ (k[b].T @ k[b]) for b in range(300))
    torch.testing.assert_close(grams.head(0).cross(), expected)


def test_empty_sums_say_so() -> None:
    with pytest.raises(StatisticsError, match="no tokens"):
        _ = Moments(3).mean
    with pytest.raises(StatisticsError, match="no samples"):
        Grams(1, 3).head(0)


# Masks and causality, against sums written out sample by sample.


def padded(lengths: list[int], width: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens (B, n, D) with garbage in the padding, and the mask of the real ones."""
    n = max(lengths)
    mask = torch.stack([(torch.arange(n) < k) if side == "right" else (torch.arange(n) >= n - k) for k in lengths])
    x = torch.randn(len(lengths), n, width, dtype=torch.float64)
    return x.masked_fill(~mask[..., None], 1e6), mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 4)])
@pytest.mark.parametrize("folded", [False, True])
def test_grams_are_sums_over_the_queries_and_keys_that_exist(
    side: str, causal: bool, window: int | None, folded: bool
) -> None:
    heads, d, lengths = 2, 3, [11, 1, 5, 11, 20]
    (q, mask), (k, _) = padded(lengths, heads * d, side), padded(lengths, heads * d, side)
    grams = Grams(heads, d)
    grams.update(q, k, q_mask=mask, k_mask=mask, causal=causal, window=window)
    if folded:
        grams.fold()
    E, H = torch.zeros(heads, d, d, dtype=torch.float64), torch.zeros(heads, d, d, dtype=torch.float64)
    kron, centred = torch.zeros(2, heads, d, d, d, d, dtype=torch.float64)
    entries = 0
    for b, length in enumerate(lengths):
        Q, K = (x[b][mask[b]].reshape(length, heads, d) for x in (q, k))
        blocks = torch.arange(length).tensor_split(min(CAUSAL_BLOCKS, length)) if causal else [torch.arange(length)]
        for block in blocks:
            entries += 1
            first = 0 if window is None else max(0, int(block[0]) - window + 1)
            seen = K[first : int(block[-1]) + 1]
            for h in range(heads):
                g_q, g_k = Q[block, h].T @ Q[block, h], seen[:, h].T @ seen[:, h]
                E[h] += g_q * g_k
                H[h] += g_q @ g_k
                kron[h] += torch.einsum("ij,kl->ijkl", g_k, g_q)
                about_mean = seen[:, h] - seen[:, h].mean(0)
                centred[h] += torch.einsum("ij,kl->ijkl", about_mean.T @ about_mean, g_q)
    assert (grams.samples, grams.entries, grams.tokens) == (5, entries, sum(lengths))
    for h in range(heads):
        head = grams.head(h)
        torch.testing.assert_close(head.energy(), E[h])
        torch.testing.assert_close(head.cross(), H[h])
        for whole, part in ((kron, head), (centred, grams.head(h, centred=True))):
            X = torch.randn(d, d, dtype=torch.float64)
            torch.testing.assert_close(part.normal().apply(X), torch.einsum("ijkl,li->kj", whole[h], X))


def test_the_blocks_of_a_causal_sample_cover_every_visible_pair_once() -> None:
    """With as many blocks as tokens the energy is that of the causal logits; blocks lie between that and all."""
    q, k = torch.randn(2, 1, CAUSAL_BLOCKS, 3, dtype=torch.float64)
    grams = Grams(1, 3)
    grams.update(q, k, causal=True)
    logits = q[0] @ k[0].T
    torch.testing.assert_close(grams.head(0).energy().sum(), logits.tril().square().sum())


def test_means_of_keys_and_their_number_are_kept_per_entry() -> None:
    (q, mask), (k, _) = padded([4, 9], 3, "right"), padded([4, 9], 3, "right")
    grams = Grams(1, 3)
    grams.update(q, k, q_mask=mask, k_mask=mask)
    state = grams.state()
    assert state["keys"].tolist() == [4, 9]
    torch.testing.assert_close(state["key_mean"][1, 0], k[1, :9].mean(0))
    again = Grams.from_state(1, 3, state)
    assert (again.samples, again.entries, again.tokens) == (2, 2, 13)


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_are_chosen_among_the_real_ones_whatever_the_padding(side: str) -> None:
    lengths = [30, 4, 17, 9]
    x, mask = padded(lengths, 2, side)
    chosen = choose_tokens(x, 7, 100, mask)
    alone = [x[b][mask[b]][None] for b in range(4)]
    parts = [choose_tokens(sample, 7, 100 + b) for b, sample in enumerate(alone)]
    expected = torch.cat([sample[0] if part is None else part for part, sample in zip(parts, alone, strict=True)])
    assert torch.equal(chosen, expected)
    assert len(chosen) == 7 + 4 + 7 + 7
    assert choose_tokens(x, 30, 100, mask) is None
    assert torch.equal(real_tokens(x, mask), torch.cat([sample[0] for sample in alone]))


def test_asking_for_a_name_reads_no_file() -> None:
    sums = stored({"mlp": Entry(4, 0, "a")}, lambda file: pytest.fail(f"{file} was looked for"))
    assert "mlp" in sums
    assert "attn" not in sums


@pytest.mark.parametrize("byte", [-1, -2, -200])
def test_one_flipped_bit_of_a_saved_sum_is_noticed(byte: int, tmp_path: Path) -> None:
    x = torch.randn(40, 6)
    written = SiteSums(moments_of(x), moments_of(x[:8]))
    path, entry = tmp_path / "site.safetensors", entry_of(written, "site.safetensors")
    write_sums(path, written)
    assert read_sums(path, entry).tensors().keys() == written.tensors().keys()
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
    with pytest.raises(StatisticsError, match="is damaged"):
        read_sums(path, entry)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ratio", [100, 1000])
def test_centred_keys_survive_a_large_mean_in_float32(ratio: int, causal: bool, window: int | None) -> None:
    """The oracle centres in float64; both Grams must have float32's own precision, and stay semidefinite."""
    q, k = torch.randn(2, 3, 40, 4)
    k = k @ torch.randn(4, 4) + ratio
    rounded, exact = Grams(1, 4), Grams(1, 4)
    rounded.update(q, k, causal=causal, window=window if causal else None)
    exact.update(q.double(), k.double(), causal=causal, window=window if causal else None)
    again = Grams.from_state(1, 4, rounded.state())
    for grams in (rounded, again, again + Grams(1, 4)):
        for centred in (False, True):
            head, oracle = (g.head(0, centred=centred) for g in (grams, exact))
            torch.testing.assert_close(
                head.cross(), oracle.cross(), rtol=1e-5, atol=1e-5 * float(oracle.cross().norm())
            )
    if not causal:
        for b in range(3):
            about = k[b].double() - k[b].double().mean(0)
            found = unpack(rounded.head(0, centred=True).k[:, b], 4)
            torch.testing.assert_close(found, about.mT @ about, rtol=1e-6, atol=1e-6 * float(about.square().sum()))
            assert float(torch.linalg.eigvalsh(found)[0]) > 0


@pytest.mark.parametrize("where", [0, 3, 9])
@pytest.mark.parametrize("side", ["q", "k"])
def test_nan_is_seen_wherever_it_is_in_a_batch(where: int, side: str) -> None:
    """Samples of several lengths become several entries, and folded entries are gone."""
    lengths = [4, 9, 4, 12, 7, 9, 5, 2, 3, 11]
    (q, mask), (k, _) = padded(lengths, 3, "right"), padded(lengths, 3, "right")
    grams = Grams(1, 3)
    grams.update(q, k, q_mask=mask, causal=True)
    assert grams.finite
    (q if side == "q" else k)[where, 1] = torch.nan
    grams.update(q, k, q_mask=mask, causal=True)
    assert not grams.finite
    grams.fold()
    assert not grams.finite
    assert not (Grams(1, 3) + grams).finite


def test_many_samples_need_few_queries_of_each() -> None:
    settings = Settings()
    assert [settings.queries_of(64, samples) for samples in (None, 1, 40, 41, 128, 10_000)] == [64, 64, 64, 63, 20, 1]
    assert settings.queries_of(128, 128) == 40  # wider heads need more
    assert Settings(tokens="all").queries_of(64, 10_000) == Settings(tokens=3).queries_of(64, 10_000) == 64


def test_calibration_takes_the_queries_that_its_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = decoders.build("llama"), [{"input_ids": torch.randint(90, (4, 12))}]
    name = next(site.name for site in corp.find_sites(model) if site.kind == "attn")
    every = corp.calibrate(model, batches).pairs_of(name).total()
    monkeypatch.setattr("corp.calibration.settings.ENOUGH_QUERIES", 8)
    monkeypatch.setattr("corp.calibration.settings.ENOUGH_PER_CHANNEL", 0)
    few = corp.calibrate(model, batches).pairs_of(name).total()
    energies = [sums.weighted.diagonal(dim1=1, dim2=2).sum() for sums in (few, every)]
    assert energies[0] < 0.5 * energies[1]  # two queries of twelve
    torch.testing.assert_close(few.raw, every.raw)  # all logits count there
