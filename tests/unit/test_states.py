"""The target's states: read online from packs, and kept on disk."""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from training_runs import make_run, rows, table

from carryover.engine import kv_numbers_per_token
from carryover.errors import DataError, EnvironmentProblem
from carryover.targets import resolve
from carryover.training.packing import Corpus
from carryover.training.session import load_data, state_cache
from carryover.training.states import ROWS_PER_PART, OnlineStates, StateCache, weights_fingerprint

LAYERS = [0, 2, 3]


def online(target_folder, corpus, **settings):
    model = resolve(str(target_folder)).load_model(dtype=torch.float32)
    return OnlineStates(model, layer_ids=LAYERS, corpus=corpus, **settings), model


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gemma4"])
def test_states_are_transformers_hidden_states_of_each_sequence_alone(tiny, architecture):
    corpus = Corpus(table(rows(6, longest=90)), max_tokens=120)
    source, model = online(tiny(architecture), corpus)
    found = source.states([4, 0, 3])
    start = 0
    for row in (4, 0, 3):
        ids = torch.from_numpy(corpus.sequence(row).input_ids_T.astype(np.int64))[None]
        end = start + ids.shape[1]
        kept = {}
        hook = model.get_decoder().norm.register_forward_pre_hook(
            lambda module, args, kept=kept: kept.update(last=args[0])
        )
        out = model(input_ids=ids, output_hidden_states=True)
        hook.remove()
        expected = torch.cat([out.hidden_states[layer] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(found.hidden_TC[start:end], expected[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            found.last_hidden_TD[start:end], kept["last"][0], atol=1e-4, rtol=1e-4
        )
        start = end
    assert len(found.hidden_TC) == start and found.prefix is None
    assert online(tiny(architecture), corpus, keep_prefix=True)[0].states([0]).prefix is not None


def cache_of(folder, target_folder, corpus, *, dtype="float32", **changes):
    target = resolve(str(target_folder))
    settings = {
        "corpus": corpus,
        "rows": corpus.usable,
        "identity": target.identity(),
        "weights": weights_fingerprint(target),
        "layer_ids": LAYERS,
        "compute_dtype": "float32",
        "dtype": dtype,
        **changes,
    }
    return StateCache(folder, **settings)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 2e-2)]
)
def test_cached_states_are_the_online_ones(tmp_path, tiny_llama, dtype, tolerance):
    corpus = Corpus(table(rows(ROWS_PER_PART + 9)), max_tokens=80)
    source, _ = online(tiny_llama, corpus)
    cache = cache_of(tmp_path, tiny_llama, corpus, dtype=dtype)
    expected_bytes = cache.size_bytes
    assert cache.missing_parts() == [0, 1] and cache.missing_bytes() == expected_bytes
    done = []
    cache.build(source, on_rows=done.append)
    assert cache.missing_parts() == [] and cache.missing_bytes() == 0
    assert sum(done) == int(corpus.lengths(corpus.usable).sum())
    on_disk = sum(file.stat().st_size for file in cache.folder.glob("part-*.arrow"))
    assert expected_bytes < on_disk < 1.1 * expected_bytes + 100_000
    wanted = [ROWS_PER_PART + 3, 0, 17]
    found, fresh = cache.states(wanted), source.states(wanted)
    for name in ("hidden_TC", "last_hidden_TD"):
        stored, exact = getattr(found, name), getattr(fresh, name)
        assert stored.dtype == getattr(torch, dtype)
        torch.testing.assert_close(stored.float(), exact, atol=tolerance, rtol=tolerance)
    file = pa.ipc.open_file(pa.memory_map(str(cache.folder / "part-000001.arrow")))
    ids = [file.get_batch(i).column("row_id")[0].as_py() for i in range(file.num_record_batches)]
    assert ids == corpus.row_ids[ROWS_PER_PART:].tolist()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gemma4"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_a_cached_prefix_is_the_online_one(tmp_path, tiny, architecture, dtype, tolerance):
    corpus = Corpus(table(rows(11)), max_tokens=80)
    source, _ = online(tiny(architecture), corpus, keep_prefix=True)
    cache = cache_of(tmp_path, tiny(architecture), corpus, dtype=dtype, prefix_width=0)
    cache.build(source)
    wanted = [9, 0, 3]
    found, fresh = cache.states(wanted), source.states(wanted)
    assert found.prefix.layers.keys() == fresh.prefix.layers.keys()
    for layer, exact in fresh.prefix.layers.items():
        for stored, computed in zip(found.prefix.layers[layer], exact, strict=True):
            assert stored.shape == computed.shape
            torch.testing.assert_close(stored.float(), computed, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        found.hidden_TC.float(), fresh.hidden_TC, atol=tolerance, rtol=tolerance
    )
    settings = {"dtype": dtype, "prefix_width": 0, "read_prefix": False}
    control = cache_of(tmp_path, tiny(architecture), corpus, **settings)
    assert control.folder == cache.folder and not control.missing_parts()
    assert control.states(wanted).prefix is None
    torch.testing.assert_close(control.states(wanted).hidden_TC, found.hidden_TC)


def test_room_is_asked_for_the_prefix_too(tmp_path, tiny_llama):
    target = resolve(str(tiny_llama))
    corpus = Corpus(table(rows(ROWS_PER_PART + 9)), max_tokens=80)
    width = kv_numbers_per_token(target.load_config())
    cache = cache_of(tmp_path, tiny_llama, corpus, prefix_width=width)
    expected_bytes = cache.missing_bytes()
    cache.build(online(tiny_llama, corpus, keep_prefix=True)[0])
    on_disk = sum(file.stat().st_size for file in cache.folder.glob("part-*.arrow"))
    assert expected_bytes < on_disk < 1.1 * expected_bytes + 100_000


def test_an_interrupted_build_continues_with_the_part_it_was_at(tmp_path, tiny_llama):
    corpus = Corpus(table(rows(ROWS_PER_PART + 9)), max_tokens=80)
    source, _ = online(tiny_llama, corpus)
    cache = cache_of(tmp_path, tiny_llama, corpus)
    seen = []

    def interrupt(tokens):
        seen.append(tokens)
        if len(seen) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.build(source, on_rows=interrupt)
    (missing,) = cache.missing_parts()
    assert not [file for file in cache.folder.iterdir() if file.name.startswith(".part")]
    done = cache.folder / f"part-{1 - missing:06d}.arrow"
    first = done.stat().st_mtime_ns
    again = cache_of(tmp_path, tiny_llama, corpus)
    again.build(source)
    assert again.missing_parts() == []
    assert done.stat().st_mtime_ns == first


def test_runs_that_fill_a_cache_at_once_share_the_work(tmp_path, tiny_llama):
    corpus = Corpus(table(rows(3 * ROWS_PER_PART + 9)), max_tokens=80)
    tokens = int(corpus.lengths(corpus.usable).sum())
    computed = Counter()

    def counted(name):
        source, _ = online(tiny_llama, corpus)
        compute = source.states

        def states(rows):
            computed[name] += len(rows)
            return compute(rows)

        source.states = states
        return source

    first, second = (cache_of(tmp_path, tiny_llama, corpus) for _ in range(2))
    done = []

    def meanwhile(tokens):
        if not done:  # in the first part that the first one came to
            (begun,) = (file.name for file in first.folder.glob("part-*.arrow.*"))
            others = [part for part in range(4) if not begun.startswith(f"part-{part:06d}")]
            second.build(counted("second"), parts=others)
        done.append(tokens)

    first.build(counted("first"), on_rows=meanwhile)
    assert computed.total() == len(corpus.usable) and computed["first"] in (9, ROWS_PER_PART)
    assert sum(done) == tokens and not first.missing_parts()


def test_another_target_layer_choice_type_or_data_has_another_folder(tmp_path, tiny, tiny_llama):
    corpus = Corpus(table(rows(5)), max_tokens=80)
    folders = {
        cache_of(tmp_path, tiny_llama, corpus).folder,
        cache_of(tmp_path, tiny_llama, corpus, layer_ids=[0, 2]).folder,
        cache_of(tmp_path, tiny_llama, corpus, dtype="float16").folder,
        cache_of(tmp_path, tiny_llama, corpus, compute_dtype="bfloat16").folder,
        cache_of(tmp_path, tiny_llama, Corpus(table(rows(6)), max_tokens=80)).folder,
        cache_of(tmp_path, tiny_llama, Corpus(table(rows(5)), max_tokens=20)).folder,
        cache_of(tmp_path, tiny("llama", seed=1), corpus).folder,
        cache_of(tmp_path, tiny_llama, corpus, prefix_width=0).folder,
    }
    assert len(folders) == 8
    assert cache_of(tmp_path, tiny_llama, corpus).folder in folders


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, tiny_llama, monkeypatch):
    corpus = Corpus(table(rows(5)), max_tokens=80)
    cache = cache_of(tmp_path / "new" / "place", tiny_llama, corpus)
    usage = shutil.disk_usage(tmp_path)._replace(free=(1 << 30) + cache.size_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(EnvironmentProblem, match=r"hidden_states\.cache=none"):
        cache.require_room()
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=usage.free + 1))
    cache.require_room()


def test_states_beyond_float16_are_refused(tmp_path, tiny_llama):
    corpus = Corpus(table(rows(3)), max_tokens=80)
    source, model = online(tiny_llama, corpus)
    with torch.no_grad():
        model.get_decoder().embed_tokens.weight.mul_(1e7)
    cache = cache_of(tmp_path, tiny_llama, corpus, dtype="float16")
    with pytest.raises(DataError, match="cache_dtype=bfloat16"):
        cache.build(source)
    cache_of(tmp_path, tiny_llama, corpus, dtype="bfloat16").build(source)


@pytest.mark.parametrize("prefix", [False, True])
def test_what_is_cached_for_which_training(tmp_path, tiny_llama, prefix):
    hidden = {"cache": "disk", "cache_folder": str(tmp_path / "hs"), "cache_prefix": prefix}
    assignment = make_run(tmp_path / "a", tiny_llama, hidden_states=hidden)
    data = load_data(assignment)
    baseline = state_cache(assignment, data, [1, 3])
    assert not baseline.keeps_prefix
    carryover = state_cache(replace(assignment, kind="carryover"), data, [1, 3])
    control = state_cache(replace(assignment, kind="control"), data, [1, 3])
    if not prefix:
        assert carryover is None and control is None
        return
    assert carryover.keeps_prefix and carryover.folder == control.folder != baseline.folder
    assert carryover.size_bytes > baseline.size_bytes
