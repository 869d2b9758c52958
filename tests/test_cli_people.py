"""People on the command line: what they are shown, what they are asked, and what is refused."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from handrail.cli import handoffs
from handrail.cli.options import InvalidDuration, duration_ms, lasting
from handrail.testing.services import EmbeddedPostgres
from tests.shop import Shop, opened
from tests.terminal import Shown, at_terminal

NASTY: Final = "\x1b[2J\u202egnol\u200b \x07 [red]p\u0430y[/red]\nstatus completed"
ACTING: Final = frozenset("\x1b\x07\u202e\u200b\u0430")
NOBODY: Final = "0" * 32


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A shop with its people; commands are given by ann, an operator."""
    with opened(tmp_path, monkeypatch, staffed=True) as made:
        yield made


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A shop in which nobody was admitted yet."""
    with opened(tmp_path, monkeypatch, staffed=False) as made:
        yield made


def problem(shop: Shop, *arguments: str) -> str:
    """Give a command that is refused; returns its code and what stands against it."""
    described = shop.json(*arguments, code=2)["error"]
    return f"{described['code']}/{described['problem']}"


def typed(shop: Shop, *arguments: str, lines: tuple[str, ...]) -> Shown:
    """Give a command at a terminal, and type these lines at its prompts."""
    command = [sys.executable, "-m", "handrail", *arguments]
    return at_terminal(command, directory=shop.directory, typed=lines)


# ---- who -----------------------------------------------------------------------------------------


def test_the_first_person_is_told_what_to_type_and_that_works(empty: Shop) -> None:
    empty.parked()

    said = empty("handoffs", "--as", "eve", code=2)
    assert said.startswith("error[not-allowed]: ")
    needed = "handrail principals admit eve --role admin --role operator --role approver"
    assert said.strip().endswith(needed)
    empty(*needed.split()[1:])

    assert empty.json("handoffs", "--as", "eve") == []
    said = empty("handoffs", "--as", "tom", code=2)
    assert "an admin has to admit it: handrail principals admit tom --role operator" in said


def test_the_first_to_be_admitted_is_an_admin(empty: Shop) -> None:
    first = ("principals", "admit", "eve", "--role", "operator")

    assert empty.refused(*first, code=2) == "not-allowed"
    assert empty("principals", "admit", "eve", "--role", "admin").startswith("eve is admin")


def test_who_acts_is_the_login_name_unless_it_is_said(
    empty: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty("principals", "admit", "boss", "--role", "admin")
    monkeypatch.delenv("HANDRAIL_OPERATOR")
    monkeypatch.setenv("LOGNAME", "laura")

    assert "'laura' may not" in empty("handoffs", code=2)
    monkeypatch.setenv("HANDRAIL_OPERATOR", "olaf")
    assert "'olaf' may not" in empty("handoffs", code=2)
    assert "'vic' may not" in empty("handoffs", "--as", "vic", code=2)


def test_admins_say_who_has_which_role(shop: Shop) -> None:
    names = {one["name"]: one for one in shop.json("principals", "list")}
    assert names["bob"] == {"name": "bob", "roles": ["approver"], "tenants": None}
    assert "bob   approver  all" in shop("principals", "list")

    admit = ("principals", "admit", "bob", "--role", "viewer", "--tenant", "acme")
    assert shop.refused(*admit, code=2) == "not-allowed"  # ann is no admin
    assert shop.json(*admit, "--as", "boss")["tenants"] == ["acme"]
    assert shop.refused("principals", "dismiss", "bob", code=2) == "not-allowed"
    assert shop.json("principals", "dismiss", "bob", "--as", "boss") == {"dismissed": "bob"}
    assert shop.refused("principals", "dismiss", "bob", "--as", "boss", code=2) == "unknown-matter"
    assert "bob" not in shop("principals", "list")


def test_a_viewer_looks_and_does_nothing(shop: Shop) -> None:
    matter, run_id = shop.handed_off(), shop.parked("note")
    as_vera = ("--as", "vera")

    assert [row["id"] for row in shop.json("handoffs", *as_vera)] == [matter]
    assert len(shop.json("approvals", *as_vera)) == 1
    sure = ("--reason", "why", "--yes")
    for act in (
        ("handoff", "claim", matter),
        ("handoff", "comment", matter, "hm"),
        ("handoff", "resolve", matter, "completed", "--evidence", "e", *sure),
        ("approve", run_id, *sure),
        ("reject", run_id, "--reason", "why"),
        ("approval", "token", run_id),
        ("cancel", run_id),
        ("pause", "--reason", "why"),
        ("resume",),
    ):
        assert shop.refused(*act, *as_vera, code=2) == "not-allowed", act
    assert shop.json("pauses") == []
    assert shop.json("show", run_id)["status"] == "awaiting_approval"


def test_an_operator_of_another_tenant_sees_nothing(shop: Shop) -> None:
    matter, run_id = shop.handed_off(), shop.parked("note")
    roles = ("--role", "operator", "--role", "approver", "--tenant", "acme")
    shop("principals", "admit", "mia", *roles, "--as", "boss")

    for listed in (["handoffs"], ["approvals"], ["handoffs", "--tenant", "default"]):
        assert shop.json(*listed, "--as", "mia") == []
    assert shop.refused("handoff", "show", matter, "--as", "mia", code=2) == "unknown-matter"
    assert shop.refused("approve", run_id, "--as", "mia", code=2) == "unknown-run"
    assert shop.refused("cancel", run_id, "--as", "mia", code=2) == "unknown-run"


# ---- the queue -----------------------------------------------------------------------------------


def test_the_queue_is_narrowed_by_what_is_asked_for(shop: Shop) -> None:
    doubt = shop.handed_off()
    run_id = shop.parked("talk", order="order-1")
    (question,) = {row["id"] for row in shop.json("handoffs")} - {doubt}

    def found(*options: str) -> list[str]:
        return [row["id"] for row in shop.json("handoffs", *options)]

    assert found() == [doubt, question]  # the more urgent first
    for options, wanted in {
        ("--workflow", "pay"): [doubt],
        ("--tool", "pay"): [doubt],
        ("--tool", "other"): [],
        ("--tenant", "default"): [doubt, question],
        ("--tenant", "acme"): [],
        ("--reason", "unknown-effect"): [doubt],
        ("--reason", "clarification-required"): [question],
        ("--subject", "buyer"): [doubt, question],
        ("--subject", "nobody"): [],
        ("--older-than", "0s"): [doubt, question],
        ("--older-than", "3d"): [],
        ("--assigned-to", "olga"): [],
        ("--mine",): [],
        ("--limit", "1"): [doubt],
        ("--resolved",): [],
    }.items():
        assert found(*options) == wanted, options

    shop("handoff", "claim", doubt)
    shop("handoff", "assign", question, "olga")
    assert found("--mine") == [doubt] and found("--mine", "--as", "olga") == [question]
    assert found("--assigned-to", "olga") == [question]
    shop("handoff", "release", doubt)
    assert found("--mine") == []
    shop("handoff", "snooze", doubt, "--for", "2h")
    assert found() == [question] and found("--snoozed") == [doubt, question]
    assert "put aside for" in shop("handoffs", "--snoozed")
    shop("answer", run_id, "the first", "--as", "olga")
    assert found("--resolved") == [question]
    assert "olga" in shop("handoffs", "--resolved")


def test_a_flood_of_handoffs_stays_a_list_that_can_be_read(shop: Shop) -> None:
    """S24: ten thousand matters are counted, and a list shows the first."""
    shop.handed_off()
    shop.forget()
    with sqlite3.connect(shop.path) as ledger:
        ledger.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)"
            " INSERT INTO handrail_handoff (id, run_id, tenant, workflow, tool, subject, reason,"
            " priority, package, status, version, opened_at)"
            " SELECT 'flood-' || i, 'run-' || i, tenant, workflow, 'mail', 'user-' || (i % 7),"
            " reason, 3, package, status, 0, opened_at FROM n, handrail_handoff"
        )
    began = time.monotonic()
    listed = shop("handoffs")
    (mails, payment) = shop.json("handoffs", "--digest")

    assert len(listed.splitlines()) == 1 + 50 + 1
    assert "these are the first 50: more with --limit, counts with --digest" in listed
    assert (mails["handoffs"], mails["subjects"], mails["tool"]) == (10_000, 7, "mail")
    assert payment["handoffs"] == 1
    assert "10000" in shop("handoffs", "--digest")
    assert len(shop.json("handoffs", "--limit", "10000")) == 10_000
    assert time.monotonic() - began < 30  # four commands; each takes well under a second


@pytest.mark.accept("TRM-15")
def test_a_matter_is_shown_with_all_that_a_person_needs(shop: Shop) -> None:
    matter = shop.handed_off()
    run_id = shop.run_of(matter)
    shop("handoff", "comment", matter, "the bank is on the phone")

    shown = shop("handoff", "show", matter)
    for words in (
        "Pay the roaster for order-42",  # the goal
        "unknown-effect",
        "no key and no answer that proves anything",
        '"approvers": ["approver-1"]',  # what is verified
        "argument cents  4200",  # the action, as it would be sent
        'argument to     "Roaster Ltd"',
        "intent key      pay:order-42",
        "tool_calls     23",  # what is left
        "the bank has not answered in time",  # evidence
        "the bank is on the phone",
        "bookkeeping",
        f"handrail trace {run_id}",
        "ends as completed. What its workflow would do next is not done.",
        "cannot be chosen: the tool has no query",
        f"handrail handoff resolve {matter} completed --reason ... --evidence ...",
    ):
        assert words in shown, words
    found = shop.json("handoff", "show", matter)
    assert found["sent_as"] == {"cents": 4200, "order": "order-42", "to": "Roaster Ltd"}
    assert found["to_type"] == "pay:order-42"
    assert [choice["resolution"] for choice in found["choices"]][:2] == ["completed", "compensated"]


@pytest.mark.accept("TRM-16")
def test_a_question_is_shown_and_answered(shop: Shop) -> None:
    run_id = shop.parked("talk")
    (row,) = shop.json("handoffs")
    shown = shop("handoff", "show", row["id"])

    assert r"Which \x1b[31morder\u202e?" in shown
    assert f"handrail answer {run_id} ..." in shown
    assert shop.refused("answer", run_id, " ", code=2) == "invalid-words"
    assert shop.refused("answer", run_id, "42", "--as", "bob", code=2) == "not-allowed"
    assert "answered" in shop("answer", run_id, f"order 42 {NASTY}")
    assert problem(shop, "answer", run_id, "42") == "approval-refused/not-asked"
    assert shop.refused("answer", NOBODY, "42", code=2) == "unknown-run"


def test_of_two_operators_one_is_at_a_matter(shop: Shop) -> None:
    matter = shop.handed_off()

    assert shop("handoff", "next").startswith("handoff")
    assert "nothing waits that nobody is at" in shop("handoff", "next", "--as", "olga")
    assert shop.json("handoff", "next", "--as", "olga") is None
    sure = ("completed", "--evidence", "statement 7", "--reason", "seen", "--yes")
    as_olga = ("--as", "olga")
    assert shop.refused("handoff", "claim", matter, *as_olga, code=2) == "handoff-taken"
    assert shop.refused("handoff", "snooze", matter, "--for", "1h", *as_olga, code=2)
    assert problem(shop, "handoff", "resolve", matter, *sure, *as_olga) == (
        "resolution-refused/claimed"
    )
    assert "ann for" in shop("handoffs", *as_olga)
    shop("handoff", "release", matter)
    assert shop.json("handoff", "claim", matter, "--for", "1h", *as_olga)["claimed_by"] == "olga"
    assert shop.json("handoff", "comment", matter, "hm")["comments"][0]["who"] == "ann"
    assert shop.json("handoff", "resolve", matter, *sure, *as_olga)["status"] == "completed"
    assert shop.refused("handoff", "claim", matter, code=2) == "handoff-taken"
    assert problem(shop, "handoff", "resolve", matter, *sure) == "resolution-refused/not-open"
    assert "completed, by olga" in shop("handoff", "show", matter)


# ---- resolving -----------------------------------------------------------------------------------


def test_what_cannot_be_taken_back_wants_its_intent_key_typed(shop: Shop) -> None:
    matter = shop.handed_off()
    shop.forget()
    words = ("completed", "--reason", "it is on the statement", "--evidence", "statement 7")

    wrong = typed(shop, "handoff", "resolve", matter, *words, lines=("pay:order-43",))
    assert wrong.code == 2 and "error[not-confirmed]: nothing was done" in wrong.screen
    assert shop.json("handoff", "show", matter)["status"] == "open"
    shop.forget()

    right = typed(shop, "handoff", "resolve", matter, *words, lines=("pay:order-42",))
    assert right.code == 0, right.screen
    said, _, done = right.screen.partition("Resolve it as completed? Type pay:order-42: ")
    assert "is recorded as applied, and the run ends as completed" in said  # before it is done
    assert "argument" in said and "resolved as completed" in done
    resolved = shop.json("handoff", "show", matter)
    assert (resolved["resolution"], resolved["resolved_by"]) == ("completed", "ann")
    assert resolved["resolved_evidence"] == "statement 7"


def test_without_a_terminal_it_takes_a_yes_and_a_reason(shop: Shop) -> None:
    matter = shop.handed_off()
    words = ("handoff", "resolve", matter, "completed", "--evidence", "statement 7")

    said = shop(*words, "--reason", "why", code=2)
    assert "the run ends as completed" in said and "error[not-confirmed]" in said
    assert shop.json(*words, "--reason", "why", code=2)["error"]["code"] == "not-confirmed"
    blank = shop.json(*words, "--reason", " ", "--yes", code=2)["error"]
    assert blank["code"] == "not-confirmed"
    assert "--reason" in shop(*words, "--yes", code=2)  # a usage error
    assert shop.json("handoff", "show", matter)["status"] == "open"
    assert shop.json(*words, "--reason", "why", "--yes")["status"] == "completed"


def test_what_stands_against_a_resolution_is_said_before_anybody_is_asked(shop: Shop) -> None:
    matter = shop.handed_off()

    def refused(how: str, *more: str) -> str:
        return problem(shop, "handoff", "resolve", matter, how, "--reason", "why", *more)

    assert refused("completed") == "resolution-refused/evidence-needed"
    assert refused("failed", "--evidence", "e") == "resolution-refused/not-possible"
    assert refused("ask-again") == "resolution-refused/not-possible"
    assert "resolution-refused" in shop(
        "handoff", "resolve", matter, "ask-again", "--reason", "why", code=2
    )
    assert shop.refused("handoff", "show", NOBODY, code=2) == "unknown-matter"
    assert shop.refused("handoff", "show", "\u202e\udcff", code=2) == "unknown-matter"
    bad_time = ("handoff", "snooze", matter, "--for", "a while")
    assert shop.refused(*bad_time, code=2) == "invalid-duration"
    assert shop.refused("handoff", "query", matter, code=2) == "resolution-refused"
    assert shop.json("handoff", "show", matter)["status"] == "open"


def test_what_has_moved_since_it_was_shown_is_not_resolved(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else wishes the run to be cancelled while the operator reads."""
    matter = shop.handed_off()
    run_id = shop.run_of(matter)

    def meanwhile(*_: object, **__: object) -> None:
        shop.loaded.fleet.cancel(run_id)

    monkeypatch.setattr(handoffs, "must_confirm", meanwhile)
    words = ("completed", "--evidence", "statement 7", "--reason", "why")
    said = shop("handoff", "resolve", matter, *words, code=2)

    assert "error[resolution-refused]: moved-on" in said
    assert f"look at it: handrail handoff show {matter}" in said
    assert shop.json("handoff", "show", matter)["status"] == "open"


def test_the_service_is_asked_and_its_answer_decides(shop: Shop) -> None:
    Path("bank-is-away").touch()
    matter = shop.handed_off("transfer")
    resolve = ("handoff", "resolve", matter)
    sure = ("--reason", "why", "--yes")

    assert shop.json("handoff", "query", matter) == {
        "answer": "noanswer",
        "problem": "ConnectionError",
    }
    assert problem(shop, *resolve, "completed", *sure) == "resolution-refused/no-answer"
    Path("bank-is-away").unlink()
    assert shop.json("handoff", "query", matter) == {"answer": "absent"}
    assert problem(shop, *resolve, "completed", *sure) == "resolution-refused/no-record"
    Path("bank.json").write_text(json.dumps({"transfer:order-42": {"paid": 4200}}))
    assert "applied" in shop("handoff", "query", matter)
    assert problem(shop, *resolve, "failed", *sure) == "resolution-refused/it-happened"
    assert "the service is asked first" in shop("handoff", "show", matter)

    assert shop.json(*resolve, "completed", *sure)["status"] == "completed"
    answers = [e for e in shop.json("handoff", "show", matter)["evidence"] if e["kind"] == "query"]
    assert len(answers) >= 3


def test_a_write_that_is_sent_again_is_agreed_to_again(shop: Shop) -> None:
    Path("bank-is-away").touch()
    matter = shop.handed_off("transfer")
    Path("bank-is-away").unlink()
    again = ("handoff", "resolve", matter, "try-again", "--grant", "2m", "--reason", "r", "--yes")

    said = shop(*again, code=2)
    (asked,) = shop.json("approvals")
    assert "error[resolution-refused]: approval-needed" in said
    assert f"an approver agrees to it: handrail approve {asked['approval']}" in said
    assert problem(shop, *again) == "resolution-refused/approval-needed"
    sure = ("--reason", "I have seen it", "--yes")
    assert "noted: 1 more has to agree" in shop("approve", asked["approval"], *sure, "--as", "bob")
    assert "agreed" in shop("approve", asked["approval"], *sure, "--as", "ada")
    assert shop.json(*again)["status"] != "handed_off"

    run_id = asked["run"]
    assert shop.loaded.fleet.drive(run_id).status == "completed"
    assert shop.loaded.records() == {"transfer:order-42": {"paid": 4200}}


# ---- consent -------------------------------------------------------------------------------------


@pytest.mark.accept("RPW-05")
def test_an_approver_sees_the_exact_action_in_full(shop: Shop) -> None:
    """S6: what is shown is what is hashed: nothing is cut off, and nothing hides."""
    long = "".join(f"line {n}, " for n in range(400))
    run_id = shop.parked("pay", to=f"{long}{NASTY}\u200d\U000e0041", cents=123)
    (asked,) = shop.json("approvals")
    shown = shop("approval", "show", run_id, "--as", "bob")
    together = "".join(shown.split())

    assert (asked["amount"], asked["intent_key"], asked["missing"]) == (123, "pay:order-42", 1)
    assert "".join(long.split()) in together
    assert not ACTING & set(shown)
    assert r"\x1b[2J" not in together  # an argument is a JSON text, with its own escapes
    assert r"\u001b[2J\u202egnol\u200b" in together and r"p\u0430y" in together
    assert r"\u200d\U000e0041" in together
    exactly = shop.loaded.fleet.desk.approval(asked["approval"], by="bob")
    assert exactly.text.replace(" ", "") in together and exactly.digest in shown
    assert json.loads(exactly.text)["arguments"] == asked["arguments"]
    assert asked["digest"] == exactly.digest
    for words in ("123", "pay:order-42", "buyer", "nobody; 1 of 1 still missing", "pay@1"):
        assert words in shown


def test_an_irreversible_act_is_agreed_to_by_typing_its_key(shop: Shop) -> None:
    run_id = shop.parked("pay")
    shop.forget()

    wrong = typed(shop, "approve", run_id, "--as", "bob", lines=("y",))
    assert wrong.code == 2 and "error[not-confirmed]" in wrong.screen
    right = typed(shop, "approve", run_id, "--as", "bob", lines=("pay:order-42",))
    assert right.code == 0, right.screen
    said, _, done = right.screen.partition("Agree to exactly this? Type pay:order-42: ")
    assert "digest" in said and f"agreed by bob: run {run_id} is executing" in done
    assert shop.json("show", run_id)["status"] == "executing"


def test_what_can_be_done_again_takes_a_plain_yes(shop: Shop) -> None:
    run_id = shop.parked("note")
    shop.forget()

    no = typed(shop, "approve", run_id, "--as", "bob", lines=("",))
    assert no.code == 2 and "you did not say yes" in no.screen
    yes = typed(shop, "approve", run_id, "--as", "bob", lines=("y",))
    assert yes.code == 0 and "[y/N]: y" in yes.screen


def test_a_tool_that_is_not_known_here_counts_as_irreversible(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = shop.parked("note")
    shop.forget()
    monkeypatch.delenv("HANDRAIL_FLEET")

    assert typed(shop, "approve", run_id, "--as", "bob", lines=("note:order-42",)).code == 0


def test_nobody_agrees_without_a_clear_yes(shop: Shop) -> None:
    run_id = shop.parked("pay")
    as_bob = ("--as", "bob")

    assert "Roaster Ltd" in shop("approve", run_id, *as_bob, code=2)  # shown, and not done
    assert "--reason" in shop("approve", run_id, *as_bob, "--yes", code=2)
    assert shop.json("approve", run_id, *as_bob, code=2)["error"]["code"] == "not-confirmed"
    assert shop.json("show", run_id)["status"] == "awaiting_approval"
    sure = ("--yes", "--reason", "seen")
    assert shop.json("approve", run_id, *as_bob, *sure)["status"] == "executing"
    assert problem(shop, "approve", run_id, *as_bob, *sure) == "approval-refused/not-pending"
    assert shop.refused("approve", NOBODY, *as_bob, code=2) == "unknown-run"


def test_two_people_agree_to_what_takes_two(shop: Shop) -> None:
    run_id = shop.parked("transfer")
    roles = ("--role", "approver")
    shop("principals", "admit", "buyer", *roles, "--as", "boss")  # on whose behalf it runs
    sure = ("--yes", "--reason", "seen")

    own = problem(shop, "approve", run_id, *sure, "--as", "buyer")
    assert own == "approval-refused/own-request"
    assert "noted: 1 more has to agree" in shop("approve", run_id, *sure, "--as", "bob")
    twice = problem(shop, "approve", run_id, *sure, "--as", "bob")
    assert twice == "approval-refused/agreed-already"
    assert "1 of 2" in shop("approvals")
    assert "bob; 1 of 2 still missing" in shop("approval", "show", run_id)
    assert "agreed by bob, ada: run" in shop("approve", run_id, *sure, "--as", "ada")


def test_a_token_counts_once_for_whom_it_is(shop: Shop) -> None:
    run_id, other = shop.parked("pay"), shop.parked("pay", order="order-7")
    issued = shop.json("approval", "token", run_id, "--to", "ada", "--as", "bob")
    (asked, _) = shop.json("approvals")
    sure = ("--token", issued["token"], "--yes", "--reason", "seen")

    assert issued["digest"] == asked["digest"]
    assert problem(shop, "approve", run_id, *sure, "--as", "bob") == "approval-refused/wrong-person"
    assert problem(shop, "approve", other, *sure, "--as", "ada") == "approval-refused/another-run"
    forged = ("--token", "nonsense", "--yes", "--reason", "seen", "--as", "ada")
    assert problem(shop, "approve", run_id, *forged) == "approval-refused/unbound"
    assert shop.json("approve", run_id, *sure, "--as", "ada")["status"] == "executing"
    assert shop("approval", "token", other, "--as", "bob").strip().isascii()


def test_a_request_is_refused_with_a_reason(shop: Shop) -> None:
    run_id = shop.parked("pay")

    assert "--reason" in shop("reject", run_id, "--as", "bob", code=2)
    assert shop.refused("reject", run_id, "--reason", " ", "--as", "bob", code=2) == "invalid-words"
    assert "refused: run" in shop("reject", run_id, "--reason", f"too dear {NASTY}", "--as", "bob")
    assert shop.json("show", run_id)["reason"] == "approval-rejected"
    (entry,) = shop.json("audit", "--act", "reject")
    assert (entry["actor"], entry["reason"]) == ("bob", f"too dear {NASTY}")


def test_requests_are_narrowed_by_what_is_asked_for(shop: Shop) -> None:
    pay, write = shop.parked("pay"), shop.parked("note")

    for options, wanted in {
        (): [pay, write],
        ("--workflow", "note"): [write],
        ("--tool", "pay"): [pay],
        ("--tenant", "acme"): [],
        ("--older-than", "1h"): [],
        ("--limit", "1"): [pay],
    }.items():
        assert [one["run"] for one in shop.json("approvals", *options)] == wanted, options
    assert "0 of 1" in shop("approvals")


# ---- runs, writes, the audit ---------------------------------------------------------------------


def test_runs_and_writes_are_narrowed_by_what_is_asked_for(shop: Shop) -> None:
    handed_off = shop.run_of(shop.handed_off())
    waits = shop.parked("note")

    for options, wanted in {
        (): [waits, handed_off],
        ("--tool", "pay"): [handed_off],
        ("--tool", "note"): [],  # nothing of it was sent
        ("--tenant", "default"): [waits, handed_off],
        ("--tenant", "acme"): [],
        ("--reason", "unknown-effect"): [handed_off],
        ("--older-than", "1d"): [],
        ("--older-than", "0s", "--workflow", "note"): [waits],
    }.items():
        found = [run["run_id"] for run in shop.json("runs", *options)]
        assert sorted(found) == sorted(wanted), options
    for options, wanted in {
        (): ["pay"],
        ("--unresolved",): ["pay"],
        ("--status", "applied"): [],
        ("--status", "handed_off", "--tool", "pay", "--workflow", "pay"): ["pay"],
        ("--workflow", "note"): [],
        ("--tenant", "acme"): [],
        ("--older-than", "1d"): [],
    }.items():
        assert [effect["tool"] for effect in shop.json("effects", *options)] == wanted, options
    assert "pay:order-42" in shop("effects") and "handed_off" in shop("effects", "--unresolved")
    for listed in ("runs", "effects", "handoffs", "approvals"):
        assert shop.refused(listed, "--tool", "\udcff", code=2) == "invalid-query"
        assert shop.refused(listed, "--older-than", "5 weeks", code=2) == "invalid-duration"


def test_people_work_on_postgresql_as_on_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: EmbeddedPostgres
) -> None:
    """All filters at once, names that no database takes, and the way of a write in doubt."""
    url = postgres.create_database("people")
    narrow = ("--workflow", "pay", "--tool", "pay", "--tenant", "default", "--older-than", "0s")
    with opened(tmp_path, monkeypatch, staffed=True, database_url=url) as shop:
        matter = shop.handed_off()
        run_id = shop.run_of(matter)
        queue = ("handoffs", *narrow, "--reason", "unknown-effect", "--subject", "buyer")

        assert [row["id"] for row in shop.json(*queue)] == [matter]
        assert shop.json(*queue, "--mine") == []
        assert [row["run_id"] for row in shop.json("runs", *narrow)] == [run_id]
        assert [row["tool"] for row in shop.json("effects", *narrow, "--unresolved")] == ["pay"]
        assert shop.json("approvals", *narrow) == []
        assert [row["handoffs"] for row in shop.json("handoffs", "--digest")] == [1]
        for strange in ("\udcff", "\u202e"):
            assert shop.refused("handoff", "show", strange, code=2) == "unknown-matter"
            assert shop.refused("approve", strange, "--as", "bob", code=2) == "unknown-run"
            assert shop.refused("runs", "--tool", strange, code=2) == "invalid-query"
            assert shop.refused("audit", "--tenant", strange, code=2) == "invalid-query"
            assert shop.refused("handoffs", "--as", strange, code=2) == "not-allowed"
        sure = ("--reason", NASTY, "--evidence", "statement 7", "--yes")
        assert shop.json("handoff", "resolve", matter, "completed", *sure)["status"] == "completed"
        assert shop.json("audit", "--run", run_id, "--act", "resolve")[0]["reason"] == NASTY
        assert shop.json("audit", "verify")["intact"]


def test_whatever_a_person_does_is_in_the_audit(shop: Shop) -> None:
    run_id = shop.parked("note")
    shop("cancel", run_id, "--reason", "not wanted")
    shop("pause", "--tool", "pay", "--reason", "the bank is down")
    shop("resume", "--tool", "pay", "--reason", "it is back", "--as", "olga")

    acts = [(e["actor"], e["act"], e["reason"]) for e in shop.json("audit", "--since", "1h")]
    assert acts[:3] == [
        ("olga", "resume", "it is back"),
        ("ann", "pause", "the bank is down"),
        ("ann", "cancel", "not wanted"),
    ]
    assert len(shop.json("audit", "--act", "admit")) == 6
    assert [e["act"] for e in shop.json("audit", "--run", run_id)] == ["cancel"]
    assert [e["act"] for e in shop.json("audit", "--actor", "olga")] == ["resume"]
    assert shop.json("audit", "--tenant", "acme") == []
    assert len(shop.json("audit", "--limit", "2")) == 2
    assert "not wanted" in shop("audit")


def test_an_audit_that_was_tampered_with_says_so(shop: Shop) -> None:
    shop("pause", "--reason", "a while")
    first = shop.json("audit", "verify")
    assert first["intact"] and first["faults"] == []
    shop("resume")
    assert shop.json("audit", "verify", "--anchor", first["head"])["intact"]
    assert f"note down: {first['entries'] + 1}:" in shop("audit", "verify")
    assert shop.refused("audit", "verify", "--anchor", "nonsense", code=2) == "invalid-query"

    shop.forget()
    with sqlite3.connect(shop.path) as ledger:
        guards = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        for (guard,) in ledger.execute(guards).fetchall():
            ledger.execute(f"DROP TRIGGER {guard}")
        changed = ledger.execute("UPDATE handrail_audit SET actor = 'eve' WHERE act = 'pause'")
        assert changed.rowcount == 1
    assert shop.json("audit", "verify", code=1)["faults"]
    assert "NOT intact" in shop("audit", "verify", code=1)


def test_before_anybody_is_admitted_anybody_may_stop_things(empty: Shop) -> None:
    run_id = empty.parked("note")

    empty("pause", "--reason", "wait", "--as", "tom")
    empty("resume", "--as", "tom")
    assert empty.json("cancel", run_id, "--as", "tom")["status"] == "cancelled"
    empty("principals", "admit", "boss", "--role", "admin")
    assert empty.refused("pause", "--reason", "wait", "--as", "tom", code=2) == "not-allowed"


# ---- what is shown -------------------------------------------------------------------------------


def test_nothing_that_came_from_outside_acts_on_the_terminal(shop: Shop) -> None:
    """S14: goal, arguments, comment, reason and evidence are shown with every sign visible."""
    matter = shop.handed_off("pay", to=NASTY)
    shop("handoff", "comment", matter, NASTY)
    for nobody in ("olga\u202e", "\x1b[31mx"):
        said = shop("handoff", "assign", matter, nobody, code=2) + shop(
            "handoffs", "--as", nobody, code=2
        )
        assert said.count("error[") == 2 and not ACTING & set(said)
    sure = ("--reason", NASTY, "--evidence", NASTY, "--yes")
    screens = [
        shop("handoffs"),
        shop("handoff", "show", matter),
        shop("effects"),
        shop("handoff", "resolve", matter, "completed", *sure),
        shop("handoff", "show", matter),
        shop("handoffs", "--resolved"),
        shop("audit"),
        shop("show", shop.run_of(matter)),
    ]

    for screen in screens:
        assert not ACTING & set(screen), screen
    assert r"because: \x1b[2J\u202egnol\u200b \x07 [red]p\u0430y[/red]\nstatus" in screens[4]
    for listed in (("handoffs", "--resolved"), ("audit",), ("handoff", "show", matter)):
        assert shop(*listed, "--json").isascii()
    assert shop.json("handoff", "show", matter)["resolved_reason"] == NASTY


@pytest.mark.parametrize(
    "words",
    [
        ("handoff", "resolve", "h", "sideways", "--reason", "why"),
        ("handoff", "resolve", "h", "completed"),
        ("handoff", "show"),
        ("handoffs", "--limit", "0"),
        ("audit", "--act", "dance"),
        ("principals", "admit", "eve", "--role", "king"),
        ("reject", "r"),
    ],
)
def test_options_that_cannot_be_read_are_an_error_in_json_too(
    empty: Shop, words: tuple[str, ...]
) -> None:
    assert empty.json(*words, code=2)["error"]["code"] == "invalid-option"
    assert empty(*words, code=2).startswith("Usage: ")


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [("90s", 90_000), ("15m", 900_000), ("2h", 7_200_000), ("3d", 259_200_000), ("0s", 0)],
)
def test_a_time_is_written_with_its_unit(text: str, time_ms: int) -> None:
    assert duration_ms("--for", text) == time_ms


@pytest.mark.parametrize("text", ["", "90", "s", "1.5h", "-1h", "2 h", "2H", "1h30m", "9" * 20])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidDuration, match="write it as 90s, 15m, 2h or 3d"):
        duration_ms("--for", text)


@pytest.mark.parametrize(
    ("time_ms", "shown"),
    [(0, "0s"), (59_999, "59s"), (61_000, "1m 1s"), (7_260_000, "2h 1m"), (90_061_000, "1d 1h")],
)
def test_a_time_is_shown_in_its_two_largest_units(time_ms: int, shown: str) -> None:
    assert lasting(time_ms) == shown


def test_every_command_for_people_says_what_it_does_and_speaks_json() -> None:
    from typer.testing import CliRunner

    from handrail.cli import app

    help_of: Any = lambda *words: CliRunner().invoke(app, [*words, "--help"]).output  # noqa: E731
    assert "2 bad input or refused" in help_of()
    for words in (
        *(("handoffs",), ("approvals",), ("approve",), ("reject",), ("answer",), ("effects",)),
        *(("runs",), ("audit",), ("audit", "verify"), ("approval", "token"), ("approval", "show")),
        *(("handoff", name) for name in ("show", "next", "claim", "release", "assign")),
        *(("handoff", name) for name in ("snooze", "comment", "query", "resolve")),
        *(("principals", name) for name in ("list", "admit", "dismiss")),
    ):
        assert "--json" in help_of(*words), words


def test_a_printed_hint_keeps_who_and_which_fleet(shop: Shop) -> None:
    matter = shop.handed_off()
    given = ("--as", "olga", "--fleet", shop.fleet)

    said = shop("handoff", "show", matter, *given)
    assert f"completed --reason ... --evidence ... --as olga --fleet {shop.fleet}" in said
    assert f"handrail trace {shop.run_of(matter)} --fleet {shop.fleet}\n" in said
    assert "--as" not in shop("handoff", "show", matter)


def test_a_hint_that_is_pasted_as_it_is_does_nothing(shop: Shop) -> None:
    matter, run_id = shop.handed_off(), shop.parked("note")
    resolve = ("handoff", "resolve", matter, "completed", "--yes")

    pasted = shop.refused(*resolve, "--reason", "...", "--evidence", "...", code=2)
    assert pasted in ("resolution-refused", "not-confirmed", "invalid-words")
    assert problem(shop, *resolve, "--reason", "seen", "--evidence", "...") == (
        "resolution-refused/evidence-needed"
    )
    assert shop.refused("reject", run_id, "--reason", "...", "--as", "bob", code=2)
    assert [row["id"] for row in shop.json("handoffs")] == [matter]


def test_a_run_that_waits_for_consent_says_how_it_is_given(empty: Shop) -> None:
    payment = ("--input", json.dumps({"order": "order-1"}), "--principal", "buyer", "--here")
    said = empty("run", "pay", "--goal", "Pay", *payment)

    assert "it waits for consent: handrail approve " in said


def test_the_doctor_counts_what_waits_for_people(shop: Shop) -> None:
    shop.handed_off()
    shop.parked("note")
    shop.parked("talk", order="order-1")
    report = shop.json("doctor")
    figures, codes = report["figures"], {one["code"]: one for one in report["findings"]}

    assert figures["handoffs_by_priority"] == {"2": 1}
    assert (figures["pending_approvals"], figures["open_questions"]) == (1, 1)
    assert figures["handed_off_effects"] == 1 and figures["oldest_handoff_ms"] >= 0
    assert "effects-settled" not in codes
    assert "1 that only a person can settle" in codes["effects-with-people"]["detail"]
    assert codes["people-needed"]["detail"].startswith("1 handoffs (1 of priority 2, the oldest")


def test_the_audit_shows_instants_as_times(shop: Shop) -> None:
    matter = shop.handed_off()
    shop("handoff", "claim", matter)

    assert "claimed_until: null -> 20" in shop("audit", "--limit", "1")
