"""API keys: only hashes are kept, comparison is constant-time, limits hold, files are private."""

import stat

import pytest

from carryover.errors import ConfigError, ServingError
from carryover.serving.config import ServeConfig
from carryover.serving.keys import ApiKey, KeyRing, TokenBucket, hash_key, make_admin_key
from carryover.serving.openai_errors import ApiError


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def ring(*names, clock=None, **settings):
    keys = [ApiKey(id=name, sha256=hash_key(f"key of {name}"), **settings) for name in names]
    return KeyRing(keys, clock=clock or Clock())


def test_any_of_several_keys_lets_in_and_nothing_else_does():
    keys = ring("a", "b", "c")
    assert [keys.check(f"Bearer key of {name}") for name in "abc"] == ["a", "b", "c"]
    assert keys.check("bearer  key of b ") == "b"
    for wrong in (None, "", "Bearer", "Bearer key of d", "key of a", "Basic key of a", "Bearer ü"):
        with pytest.raises(ApiError) as caught:
            keys.check(wrong)
        assert caught.value.status == 401 and caught.value.headers()["www-authenticate"]


def test_without_keys_everybody_is_let_in_unless_one_is_required():
    assert KeyRing([]).check(None) is None
    with pytest.raises(ApiError):
        KeyRing([], required=True).check("Bearer anything")


def test_a_revoked_key_no_longer_counts():
    keys = ring("a", "b")
    with pytest.raises(ApiError):
        keys.check("Bearer key of a", revoked={"a"})
    assert keys.check("Bearer key of b", revoked={"a"}) == "b"


def test_a_key_is_held_to_its_rate_and_others_are_not_touched():
    clock = Clock()
    keys = ring("a", "b", clock=clock, requests_per_minute=60, burst=3)
    for _ in range(3):
        keys.check("Bearer key of a")
    with pytest.raises(ApiError) as caught:
        keys.check("Bearer key of a")
    assert caught.value.status == 429 and caught.value.headers()["retry-after"] == "1"
    assert keys.check("Bearer key of b") == "b"
    clock.now += 1.01
    assert keys.check("Bearer key of a") == "a"


def test_a_bucket_lets_through_its_rate_on_average():
    clock = Clock()
    bucket = TokenBucket(10, 5, clock=clock)
    passed = 0
    for _ in range(1000):
        passed += bucket.take() == 0
        clock.now += 0.01
    assert 100 <= passed <= 106


def test_replicas_together_grant_the_rate():
    clock = Clock()
    key = ApiKey(id="a", sha256=hash_key("a"), requests_per_minute=60, burst=1)
    rings = [KeyRing([key], replicas=4, clock=clock) for _ in range(4)]
    passed = 0
    for step in range(4000):
        try:
            rings[step % 4].check("Bearer a")
            passed += 1
        except ApiError:
            pass
        clock.now += 0.01
    # 40 s at one a second, and each replica's burst
    assert 36 <= passed <= 44


def test_every_key_is_compared_whichever_matches(monkeypatch):
    compared = []
    import hmac

    real = hmac.compare_digest
    monkeypatch.setattr(
        "carryover.serving.keys.hmac.compare_digest",
        lambda a, b: compared.append(1) or real(a, b),
    )
    ring("a", "b", "c").check("Bearer key of a")
    assert len(compared) == 3


def test_the_admin_key_is_its_owners_alone(tmp_path):
    made = make_admin_key(tmp_path / "state")
    path = tmp_path / "state" / "admin.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = path.read_text().strip()
    assert made.sha256 == hash_key(key) and key not in made.model_dump_json()
    assert KeyRing([made], required=True).check(f"Bearer {key}") == made.id
    assert make_admin_key(tmp_path / "state").sha256 != made.sha256
    (tmp_path / "file").write_text("")
    with pytest.raises(ServingError, match=r"traffic\.state"):
        make_admin_key(tmp_path / "file" / "state")


@pytest.mark.parametrize(
    ("security", "message"),
    [
        ({"keys": [{"id": "a", "sha256": "abc"}]}, "sha256"),
        ({"keys": [{"id": "a b", "sha256": "0" * 64}]}, "id"),
        ({"keys": [{"id": "a", "sha256": "0" * 64}, {"id": "a", "sha256": "1" * 64}]}, "twice"),
        ({"keys": [{"id": "a", "sha256": "0" * 64}],
          "admin_keys": [{"id": "b", "sha256": "0" * 64}]}, "admin's"),
    ],
)  # fmt: skip
def test_a_wrong_security_section_is_refused(security, message):
    with pytest.raises(ConfigError, match=message):
        ServeConfig.parse({"arms": [{"name": "a"}], "security": security})
