"""Training of a small target: its text, its loop, and what it leaves."""

import json

import numpy as np
import pytest
import torch
from training_runs import Remember, table

from carryover.data.responses import require_target
from carryover.errors import CheckpointError, ConfigError, DataError
from carryover.targets import resolve
from carryover.training.snapshots import Snapshots
from carryover.training.target_config import TargetTrainConfig
from carryover.training.target_session import TargetAssignment, build_target_loop, make_initial
from carryover.training.target_text import blocks_of, read_texts, split_blocks, train_tokenizer
from carryover.training.workers import Workers

SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
SETTINGS = {
    "shape": SHAPE,
    "block_length": 32,
    "blocks_per_step": 4,
    "max_steps": 24,
    "epochs": 100,
    "precision": "float32",
    "optimizer": {"lr": 1e-2},
    "evaluation": {"every_steps": 8, "held_out_blocks": 4},
    "checkpoints": {"every_steps": 5, "keep": 30},
}


@pytest.fixture(scope="module")
def writer(tiny_llama):
    return resolve(str(tiny_llama))


@pytest.fixture(scope="module")
def texts(writer):
    tokenizer = writer.load_tokenizer()
    rows = []
    for number in range(40):
        question = f"What is {number} plus {number + 1}?"
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        answer = f"It is {2 * number + 1}, because {number} and {number + 1} make it.<|im_end|>"
        rows.append(
            {
                "id": number, "source": "test", "category": "math", "temperature": 0.0,
                "prompt_ids": tokenizer.encode(prompt), "response_ids": tokenizer.encode(answer),
                "finish": "stop",
            }
        )  # fmt: skip
    made = table(rows)
    require_target(made, writer.identity(), source="test")
    return read_texts(made, tokenizer)


def start(folder, texts, writer, **changes):
    config = TargetTrainConfig.parse({**SETTINGS, **changes})
    assignment = TargetAssignment(config, folder)
    if not assignment.initial.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_initial(config, texts, writer, assignment.initial)
    return assignment


def run(assignment, *, stop_at=None):
    reporter = Remember(stop_at)
    loop = build_target_loop(assignment, workers=Workers(), reporter=reporter)
    return loop.run(), reporter


def test_texts_are_whole_conversations(texts):
    assert texts[3].startswith("<|im_start|>user\nWhat is 3 plus 4?<|im_end|>\n")
    assert texts[3].endswith("It is 7, because 3 and 4 make it.<|im_end|>")


def test_its_tokenizer_keeps_marks_and_template_and_has_the_size_asked_for(texts, writer):
    like = writer.load_tokenizer()
    made = train_tokenizer(texts, like, 310)
    assert len(made) == 310
    assert made.decode(made.encode(texts[0])) == texts[0]
    assert len(made.encode("<|im_end|>")) == 1
    assert made.eos_token == like.eos_token and made.chat_template == like.chat_template
    with pytest.raises(DataError, match=r"vocab_size asks for 60,000; lower it to \d+"):
        train_tokenizer(texts, like, 60_000)


def test_blocks_hold_all_text_in_order(texts, writer):
    tokenizer = writer.load_tokenizer()
    blocks = blocks_of(texts, tokenizer, 16)
    assert blocks.dtype == np.int32 and blocks.shape[1] == 16
    assert "".join(texts).startswith(tokenizer.decode(blocks.ravel()))
    with pytest.raises(DataError, match="less than three blocks of 100000"):
        blocks_of(texts, tokenizer, 100_000)


@pytest.mark.parametrize(("blocks", "asked", "held"), [(100, 8, 8), (30, 8, 3), (3, 8, 1)])
def test_held_out_blocks_are_never_trained_on(blocks, asked, held):
    train, held_out = split_blocks(np.arange(blocks)[:, None], asked)
    assert len(held_out) == held
    assert sorted([*train[:, 0], *held_out[:, 0]]) == list(range(blocks))


def test_the_loss_falls_and_what_comes_out_is_a_target(tmp_path, texts, writer):
    assignment = start(tmp_path, texts, writer)
    progress, reporter = run(assignment)
    seen = reporter.losses()
    assert progress.finished and len(seen) == 24
    assert np.mean(seen[-4:]) < 0.6 * seen[0]
    evaluations = [event["metrics"]["loss"] for event in reporter.of("evaluation")]
    assert len(evaluations) == 3 and min(evaluations) == progress.best["loss"]
    best = resolve(str(tmp_path / "best"))
    assert best.load_config().vocab_size == 300
    model, tokenizer = best.load_model(), best.load_tokenizer()
    assert tokenizer.chat_template == writer.load_tokenizer().chat_template
    # the loss that was reported is that of the model that was written
    _, held_out = split_blocks(np.load(assignment.initial / "blocks.npy"), 4)
    ids = torch.from_numpy(held_out.astype(np.int64))
    assert float(model(input_ids=ids, labels=ids).loss) == pytest.approx(progress.best["loss"])


def test_a_stopped_run_continues_as_if_it_had_not_been(tmp_path, texts, writer):
    _, whole = run(start(tmp_path / "whole", texts, writer))
    broken = start(tmp_path / "broken", texts, writer)
    progress, first = run(broken, stop_at=7)
    assert progress.step == 7 and Snapshots(tmp_path / "broken", keep=9).steps()[-1] == 7
    _, second = run(broken)
    assert first.losses() + second.losses() == whole.losses()
    files = {path.suffix for path in (tmp_path / "broken").rglob("*") if path.is_file()}
    assert files <= {".json", ".safetensors", ".npy", ".jinja"}, "and no pickle"


def test_bfloat16_products_change_little(tmp_path, texts, writer):
    short = run(start(tmp_path / "short", texts, writer, precision="bfloat16"))[1].losses()
    whole = run(start(tmp_path / "whole", texts, writer))[1].losses()
    assert short != whole
    assert short[:8] == pytest.approx(whole[:8], rel=0.05)


def test_a_damaged_beginning_is_named(tmp_path, texts, writer):
    assignment = start(tmp_path, texts, writer)
    (assignment.initial / "blocks.npy").write_bytes(b"not an array")
    with pytest.raises(CheckpointError, match=r"blocks.npy cannot be read.*--restart"):
        run(assignment)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": {**SHAPE, "hidden_size": 33}}, "multiple of num_attention_heads"),
        ({"shape": {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 3}}, "key_value"),
        ({"block_length": 256}, "exceeds shape.max_position_embeddings"),
        ({"resources": {"num_workers": 3}}, "must be a multiple of"),
        ({"resources": {"parallelism": "fsdp"}}, "copied, not sharded"),
        ({"name": "../up"}, "a name has letters"),
        ({"shape": {**SHAPE, "num_layer": 3}}, "num_layers"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(changes, said):
    with pytest.raises(ConfigError, match=said):
        TargetTrainConfig.parse({**SETTINGS, **changes})


def test_a_diverged_run_says_what_to_change(tmp_path, texts, writer):
    assignment = start(tmp_path, texts, writer)
    loop = build_target_loop(assignment, workers=Workers(), reporter=Remember())
    with torch.no_grad():
        next(loop.model.parameters()).fill_(float("nan"))
    with pytest.raises(ConfigError, match=r"the loss is nan.*lower optimizer.lr"):
        loop.run()


def test_fingerprint_leaves_out_where_it_runs():
    changed = {"name": "other", "checkpoints": {"every_steps": 7}, "resources": {"max_restarts": 3}}
    same = TargetTrainConfig.parse({**SETTINGS, **changed}).fingerprint()
    assert json.dumps(same) == json.dumps(TargetTrainConfig.parse(SETTINGS).fingerprint())
    other = TargetTrainConfig.parse({**SETTINGS, "seed": 1}).fingerprint()
    assert same != other
