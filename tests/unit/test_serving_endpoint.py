"""What is checked before anything is started."""

import os
import socket

import pytest

from carryover.errors import ConfigError, ServingError
from carryover.serving.cluster import claim_port
from carryover.serving.config import Http, ServeConfig
from carryover.serving.endpoint import running


def test_a_free_port_is_taken_and_zero_finds_one():
    port = claim_port(Http(port=0))
    assert port > 0
    assert claim_port(Http(port=port)) == port


def test_a_port_in_use_is_told_with_its_user_and_the_way_out():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError) as caught:
            claim_port(Http(port=port))
    message = str(caught.value)
    assert f"127.0.0.1:{port}" in message and "--set http.port=PORT" in message
    assert f"process {os.getpid()}" in message


def test_a_host_of_another_machine_is_refused():
    with pytest.raises(ServingError, match=r"cannot listen on 203\.0\.113\.1"):
        claim_port(Http(host="203.0.113.1", port=0))


def test_a_bad_drafter_is_refused_before_anything_starts(tmp_path, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    arms = [{"name": "plain"}, {"name": "fast", "drafter": str(tmp_path / "absent")}]
    with (
        pytest.raises(ConfigError, match="no drafter folder"),
        running(ServeConfig.parse({"arms": arms, "resources": {"device": "cpu"}})),
    ):
        pass
