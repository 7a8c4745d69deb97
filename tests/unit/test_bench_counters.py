"""vLLM's counters from Ray's page and from vLLM's own."""

from carryover.bench import counters
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


class Page:
    """A metrics page whose counter is exported two readings late."""

    def __init__(self, monkeypatch):
        self.value = self.shown = 0
        self.readings = 0
        monkeypatch.setattr(counters, "read_counters", self.read)
        monkeypatch.setattr(counters, "POLL_S", 0.001)
        monkeypatch.setattr(counters, "QUIET_S", 0.01)

    def read(self, url):
        self.readings += 1
        if self.readings % 3 == 0:
            self.shown = self.value
        return {"dflash": {"num_drafts": float(self.shown)}}


def test_a_window_waits_for_late_counts_and_leaves_the_warm_up_out(monkeypatch):
    page = Page(monkeypatch)
    window = counters.Window("http://x")
    page.value = 5
    window.begin({"dflash": 5, "autoregressive": 0})
    page.value = 25
    assert window.end({"dflash": 20, "autoregressive": 0})["dflash"]["num_drafts"] == 20.0


def test_a_window_gives_up_on_counts_that_never_come(monkeypatch):
    Page(monkeypatch)
    monkeypatch.setattr(counters, "SETTLE_S", 0.05)
    window = counters.Window("http://x")
    window.begin({})
    assert window.end({"dflash": 20})["dflash"]["num_drafts"] == 0.0
