"""When ranks are started again, and what a run of several ends with."""

from __future__ import annotations

import pytest

from lockstep import cli
from lockstep.errors import STALLED, LostProcess, Refusal
from lockstep.launch.restarts import status_of, with_restarts, worst


@pytest.mark.parametrize(
    ("statuses", "turns", "last"),
    [
        ([0], 1, 0),
        ([137, 0], 2, 0),
        ([STALLED, 1, 0], 3, 0),
        ([1, 1, 1, 0], 3, 1),  # two restarts are allowed
        ([2, 0], 1, 2),  # refused input is refused again
        ([130, 0], 1, 130),  # Ctrl-C
        ([143, 0], 1, 143),
    ],
)
def test_what_is_started_again(statuses: list[int], turns: int, last: int, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def start(turn: int) -> int:
        seen.append(turn)
        return statuses[turn]

    assert with_restarts(start, 2) == last
    assert seen == list(range(turns))
    assert capsys.readouterr().err.count("restart ") == turns - 1


@pytest.mark.parametrize(
    ("statuses", "told"),
    [([0, 0], 0), ([1, 137], 137), ([STALLED, 137, 1], STALLED), ([2, 1], 1), ([130, 0], 130), ([2, 0], 2)],
)
def test_the_worst_rank_is_told(statuses: list[int], told: int) -> None:
    assert worst(statuses) == told


def test_a_signal_as_a_shell_tells_it() -> None:
    assert [status_of(code) for code in (0, 2, -9)] == [0, 2, 137]


@pytest.mark.parametrize(("kind", "turns"), [(Refusal, 1), (LostProcess, 2)])
def test_what_was_lost_is_worth_another_try_and_what_was_refused_is_not(
    kind: type[Refusal], turns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise kind.at("rollout worker", "is gone", "look for it", code="worker-lost")

    def start(turn: int) -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr("sys.argv", ["lockstep"])
    assert with_restarts(start, 1) == (STALLED if kind is LostProcess else 2)
    assert capsys.readouterr().err.count("is gone") == turns
