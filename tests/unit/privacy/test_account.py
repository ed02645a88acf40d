"""The account of a client, and the secret of its noise."""

import stat
from pathlib import Path

import pytest
import torch

from fedvit.core.errors import UserError
from fedvit.core.payload import Payload
from fedvit.privacy.account import Account
from fedvit.privacy.accounting import Steps
from fedvit.privacy.secret import draws, keep_secret, message_key


def test_an_answer_is_charged_once_however_often_its_round_is_repeated(tmp_path: Path) -> None:
    account = Account(tmp_path / "accounts" / "a.jsonl")
    account.charge(1, "first", 1.5, {0.1: 20}, None)
    account.charge(1, "first", 1.5, {0.1: 20}, None)
    assert account.history() == [Steps(1.5, 0.1, 20)]
    account.charge(1, "another message", 1.5, {0.1: 20}, None)  # of the same round: another answer
    account.charge(2, "first", 1.5, {0.1: 20}, None)
    assert account.history() == [Steps(1.5, 0.1, 20)] * 3


def test_a_line_that_a_kill_cut_short_belongs_to_an_answer_that_never_left(tmp_path: Path) -> None:
    account = Account(tmp_path / "a.jsonl")
    account.charge(1, "first", 1.5, {0.1: 20}, None)
    with account.path.open("a") as stream:
        stream.write('{"round": 2, "mess')
    account.charge(2, "second", 1.5, {0.1: 20}, None)
    assert [line["round"] for line in account.lines()] == [1, 2]


def test_what_the_noise_was_not_chosen_for_is_refused_before_it_leaves(tmp_path: Path) -> None:
    account = Account(tmp_path / "a.jsonl")
    account.charge(1, "first", 1.5, {0.1: 20}, {0.1: 30})
    with pytest.raises(UserError, match=r"budget .* is spent: 40 gradients .* for 30"):
        account.charge(2, "second", 1.5, {0.1: 20}, {0.1: 30})
    with pytest.raises(UserError, match=r"is spent: 5 gradients .* for 0"):
        account.charge(2, "second", 1.5, {0.2: 5}, {0.1: 30})
    assert len(account.lines()) == 1


def test_a_secret_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    secret = keep_secret(path)
    assert keep_secret(path) == secret
    assert keep_secret(tmp_path / "other") != secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("not a secret")
    with pytest.raises(UserError, match="does not hold the secret"):
        keep_secret(path)
    path.write_text("ab")
    with pytest.raises(UserError, match="64 hexadecimal digits, found 2"):
        keep_secret(path)


def test_noise_depends_on_the_secret_the_round_the_client_and_the_message() -> None:
    message = Payload({"shared": {"w": torch.ones(3)}}, {"round": 1})
    other = Payload({"shared": {"w": torch.ones(3) + 1e-6}}, {"round": 1})
    key = message_key(b"s" * 32, 1, "a", message)
    same = Payload({"shared": {"w": torch.ones(3)}}, {"round": 1})
    assert message_key(b"s" * 32, 1, "a", same) == key
    others = [(b"t" * 32, 1, "a", message), (b"s" * 32, 2, "a", message), (b"s" * 32, 1, "b", message),
              (b"s" * 32, 1, "a", other)]  # fmt: skip
    assert len({key, *(message_key(*one) for one in others)}) == 5
    assert draws(key, "noise", 1).standard_normal() == draws(key, "noise", 1).standard_normal()
    assert draws(key, "noise", 1).standard_normal() != draws(key, "noise", 2).standard_normal()
