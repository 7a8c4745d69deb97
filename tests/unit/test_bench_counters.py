"""vLLM's counters from Ray's page and from vLLM's own."""

from carryover.bench.counters import counter_deltas, parse_counters

RAY_PAGE = """\
# HELP ray_vllm_spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE ray_vllm_spec_decode_num_drafts_total counter
ray_vllm_spec_decode_num_drafts_total{ReplicaId="a",engine="0",model_name="dflash"} 20.0
ray_vllm_spec_decode_num_drafts_total{ReplicaId="b",engine="0",model_name="dflash"} 3.0
# TYPE ray_vllm_spec_decode_num_accepted_tokens_total counter
ray_vllm_spec_decode_num_accepted_tokens_total{ReplicaId="a",model_name="dflash"} 7.0
# TYPE ray_vllm_spec_decode_num_accepted_tokens_per_pos_total counter
ray_vllm_spec_decode_num_accepted_tokens_per_pos_total{model_name="dflash",position="0"} 5.0
ray_vllm_spec_decode_num_accepted_tokens_per_pos_total{model_name="dflash",position="1"} 2.0
# TYPE ray_other_total counter
ray_other_total{model_name="dflash"} 5.0
"""
VLLM_PAGE = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
"""


def test_replicas_are_added_and_positions_kept():
    assert parse_counters(RAY_PAGE) == {
        "dflash": {
            "num_drafts": 23.0,
            "num_accepted_tokens": 7.0,
            "num_accepted_tokens_per_pos.0": 5.0,
            "num_accepted_tokens_per_pos.1": 2.0,
        }
    }


def test_vllms_own_page_is_read_too():
    assert parse_counters(VLLM_PAGE) == {"m": {"num_drafts": 4.0}}


def test_a_page_without_speculation_has_none():
    assert parse_counters("") == {}


def test_what_was_not_there_before_counts_from_zero():
    before = {"a": {"num_drafts": 2.0}}
    after = {"a": {"num_drafts": 5.0, "num_accepted_tokens": 1.0}, "b": {"num_drafts": 4.0}}
    assert counter_deltas(before, after) == {
        "a": {"num_drafts": 3.0, "num_accepted_tokens": 1.0},
        "b": {"num_drafts": 4.0},
    }
