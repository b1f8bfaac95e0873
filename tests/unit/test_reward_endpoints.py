"""Several endpoints, and the circuit breaker of each, against real servers."""

from __future__ import annotations

from lockstep.recipe.keys_reward import Reward
from lockstep.reward.remote import RemotePart
from reward_servers import asked, by_length, opened, serving


def test_endpoints_share_the_batches() -> None:
    with serving(by_length) as one, serving(by_length) as other:  # noqa: SIM117
        with opened([one.address, other.address], remote_batch=1) as part:
            assert asked(part, ["a", "bb", "ccc", "dddd"]) == [{"remote": float(n)} for n in (1, 2, 3, 4)]
            assert len(one.requests) == len(other.requests) == 2


def test_a_dead_endpoint_is_left_out_while_another_is_there() -> None:
    """After 3 failures in a row nothing more is sent to it; no response is lost."""
    with serving(by_length) as good, serving(lambda number, items: (500, b"broken")) as bad:  # noqa: SIM117
        with opened([bad.address, good.address], remote_batch=1, remote_retries=9) as part:
            for _ in range(10):
                assert asked(part, ["ab"]) == [{"remote": 2.0}]
            assert len(bad.requests) == 3
            assert len(good.requests) == 10


def test_when_all_are_left_out_a_batch_fails_at_once_and_says_so() -> None:
    with serving(lambda number, items: (500, b"broken")) as one, serving(lambda n, i: (502, b"")) as other:  # noqa: SIM117
        with opened([one.address, other.address], remote_batch=1, remote_retries=5) as part:
            assert "; 0 of 2 endpoints left" in asked(part, ["a"])[0].why
            requests = len(one.requests) + len(other.requests)
            why = asked(part, ["b"])[0].why
            assert why.startswith("0 of 2 endpoints left; ")
            assert f"{one.address} failed " in why
            assert "answered 500 Internal Server Error: broken" in why
            assert f"{other.address} failed " in why
            assert len(one.requests) + len(other.requests) == requests


def test_an_endpoint_that_comes_back_is_used_again() -> None:
    def broken_at_first(number: int, items: list[dict]) -> tuple[int, bytes]:
        return (500, b"") if number <= 4 else by_length(number, items)

    with serving(broken_at_first) as server:
        settings = Reward(remote_batch=1, remote_retries=2)
        part = RemotePart(server.address, settings, first_pause=0.01, skip_seconds=0.0)
        # 3 tries of the first batch; then each batch may try once more, at once here: the fourth fails, the fifth not.
        assert "tried 3 times; 0 of 1 endpoints left" in asked(part, ["ab"])[0].why
        assert asked(part, ["ab"]) == [{"remote": 2.0}]
        assert asked(part, ["ab"]) == [{"remote": 2.0}]
        assert len(server.requests) == 6
        part.close()


def test_a_busy_endpoint_is_not_left_out() -> None:
    def busy(number: int, items: list[dict]) -> tuple[int, bytes]:
        return (429, b"busy") if number <= 8 else by_length(number, items)

    with serving(busy) as server, opened(server.address, remote_batch=1) as part:
        for _ in range(2):
            assert "tried 4 times; 1 of 1 endpoints left" in asked(part, ["a"])[0].why
        assert asked(part, ["ab"]) == [{"remote": 2.0}]
