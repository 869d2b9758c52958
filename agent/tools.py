"""What a tool is: an executable contract with conservative defaults.

A contract says what goes in, what comes out, what kind of side effect a call has, how long it may
take, who must agree, what the business intent of a call is, and how doubt about it is resolved.
Undeclared means: an irreversible write, serial, the shortest time limit, with approval. Pure: the
functions that a `Tool` carries are called by the shell alone, `intent`, `allow` and the checks on
arguments and results excepted, which must be pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel

from handrail.agent.retry import Retry, must_be_retry
from handrail.canonical import Json, canonical, digest, dumps, normal
from handrail.errors import InvalidDefinition, NotCanonical

FOREVER: Final = 2**53
SHORTEST_TIMEOUT_MS: Final = 5_000
DEFAULT_SETTLE_MS: Final = 5_000
DEFAULT_OUTPUT_BYTES: Final = 64_000
#: An intent key is indexed: what names a business object and an action is short.
MAX_INTENT_CHARACTERS: Final = 1_000
#: A secret that could be tried out would let anybody report.
SHORTEST_SECRET: Final = 16


class SideEffect(StrEnum):
    """The five classes of side effect, from harmless to final."""

    READ = "read"
    REPLAYABLE = "replayable"
    IDEMPOTENT = "idempotent"
    COMPENSABLE = "compensable"
    IRREVERSIBLE = "irreversible"

    @property
    def writes(self) -> bool:
        """Whether a call can change the world outside."""
        return self not in (SideEffect.READ, SideEffect.REPLAYABLE)

    @property
    def coarse(self) -> str:
        """`none` or `write`, as the trace shows it."""
        return "write" if self.writes else "none"


class Approval(StrEnum):
    """When a person is asked before a call."""

    NEVER = "never"
    ON_WRITE = "on-write"
    ALWAYS = "always"


class Guarantee(StrEnum):
    """What, on the server's side, makes a write happen at most once."""

    IDEMPOTENCY_KEY = "idempotency-key"  # the service honours our key, see `key_valid_for_ms`
    UNIQUE_CONSTRAINT = "unique-constraint"
    TRANSACTION = "transaction"
    NOT_AFTER = "not-after"  # the service refuses a request that arrives after its deadline
    PERSON = "person"  # nothing does: a doubt is for a query, or for a person


class Permit(StrEnum):
    """A policy's answer about one call."""

    ALLOW = "allow"
    WITH_APPROVAL = "with-approval"  # a person can permit it: the run waits
    DENY = "deny"  # nobody can: the run stops


@dataclass(frozen=True, slots=True)
class Principal:
    """On whose behalf a run acts: its subject and what that subject may do; also a person who
    looks at runs and decides about them.

    `roles` are those of a person (viewer, operator, approver, admin), in these `tenants` (None: in
    all). They are not stored with a run: what a run does, no role of its principal widens.
    """

    subject: str = "anonymous"
    permissions: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()
    tenants: frozenset[str] | None = None

    def sees(self, tenant: str) -> bool:
        """Whether this person has to do with a tenant."""
        return self.tenants is None or tenant in self.tenants

    def to_json(self) -> dict[str, Any]:
        """Return the principal as a JSON object."""
        return {"subject": self.subject, "permissions": sorted(self.permissions)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Principal:
        """Read what `to_json` wrote."""
        return cls(str(value["subject"]), frozenset(value["permissions"]))


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a policy, an intent or a workflow's function may know of the run. Nothing in it can
    be changed.
    """

    run_id: str
    tenant: str
    goal: str
    principal: Principal
    input: Json = None
    outputs: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))
    tool_calls: int = 0  # charged so far, the one that is being considered not included


Arguments = Any  # the tool's input model, or a plain object where it declares none


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContract:
    """The declaration of one tool; see the module. All times are milliseconds.

    `key_valid_for_ms`: how long the service honours the intent key (0: it does not; `FOREVER`).
    `stores_failures`: a refusal is stored under the key and given again, so that none is worth
    another try. `confirmed_by_query`: a receipt is believed once the tool's query has found what it
    says, which costs a call more. `not_after`: the service
    refuses a request that arrives after the deadline in it. `settle_after_ms`: how long after the
    last moment to send it a write may still land. `pending_for_ms`: how long the answer "pending"
    is normal. `amount` names the argument that is an amount, an integer in minor units: approvals
    show it, and above `second_approver_above` two people have to agree (`approvers=2`: always).
    `requester_approves`: on whose behalf the run acts may be one of them.
    `takeover` names the person or queue that a doubt goes to which no query settles.
    `retry` makes a read again that failed for a reason that may pass; a replayable call has one by
    default, a write none. `intent(arguments, run)` names the business object and the action, never
    run, step or time. `postcondition(arguments, result)` and `belongs_to(result, run)` judge a
    result before it enters the state. `public(arguments, result)` gives harmless facts for the
    trace. `volatile` names fields that take no part in fingerprints and comparisons.
    """

    name: str
    description: str = ""
    version: str = "1"
    input: type[BaseModel] | None = None
    output: type[BaseModel] | None = None
    side_effect: SideEffect = SideEffect.IRREVERSIBLE
    concurrency_safe: bool = False
    timeout_ms: int = SHORTEST_TIMEOUT_MS
    approval: Approval | None = None
    amount: str | None = None
    approvers: int = 1
    second_approver_above: int | None = None
    requester_approves: bool = False
    permission: str | None = None
    allow: Callable[[Arguments, RunFacts], Permit] | None = None
    intent: Callable[[Arguments, RunFacts], str] | None = None
    guarantee: Guarantee | None = None
    key_valid_for_ms: int = 0
    stores_failures: bool = False
    confirmed_by_query: bool = False
    not_after: bool = False
    can_query: bool = False
    settle_after_ms: int = DEFAULT_SETTLE_MS
    pending_for_ms: int = 60_000
    takeover: str | None = None
    retry: Retry | None = None
    max_output_bytes: int = DEFAULT_OUTPUT_BYTES
    volatile: frozenset[str] = frozenset()
    postcondition: Callable[[Arguments, Json], bool] | None = None
    belongs_to: Callable[[Json, RunFacts], bool] | None = None
    public: Callable[[Arguments, Json], Mapping[str, Json]] | None = None

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name or name != name.strip():
            raise InvalidDefinition(self._title, "give it a name without outer blanks")
        must_be_functions(
            self._title,
            allow=self.allow,
            intent=self.intent,
            postcondition=self.postcondition,
            belongs_to=self.belongs_to,
            public=self.public,
        )
        for field_name, is_right, wanted in _OF_TYPE:
            if not is_right(getattr(self, field_name)):
                raise InvalidDefinition(self._title, f"{field_name} must be {wanted}")
        for unit in ("timeout_ms", "max_output_bytes"):
            value = getattr(self, unit)
            if type(value) is not int or value < 1:
                raise InvalidDefinition(self._title, f"{unit} must be a whole number of at least 1")
        for unit in ("key_valid_for_ms", "settle_after_ms", "pending_for_ms"):
            value = getattr(self, unit)
            if type(value) is not int or value < 0:
                raise InvalidDefinition(self._title, f"{unit} must be a whole number of at least 0")
        must_be_retry(self._title, self.retry)
        self._check_approvers()
        if self.side_effect.writes:
            self._check_write()
        if self.confirmed_by_query and not (self.side_effect.writes and self.can_query):
            raise InvalidDefinition(self._title, "confirmed_by_query is for a write with a query")

    @property
    def _title(self) -> str:
        return f"tool {self.name!r}"

    def _check_approvers(self) -> None:
        if self.amount is not None and not (
            self.input is not None and self.amount in self.input.model_fields
        ):
            raise InvalidDefinition(
                self._title, "amount must name a field of the input model: an integer, minor units"
            )
        if self.approvers not in (1, 2) or type(self.approvers) is not int:
            raise InvalidDefinition(self._title, "approvers must be 1 or 2")
        above = self.second_approver_above
        if above is not None and (type(above) is not int or above < 0 or self.amount is None):
            raise InvalidDefinition(
                self._title,
                "second_approver_above must be a whole number of at least 0, and amount name what"
                " it is compared with",
            )

    def _check_write(self) -> None:
        if self.intent is None:
            raise InvalidDefinition(
                self._title,
                "a write must declare intent(arguments, run): the stable identity of the business"
                " act (declare side_effect='read' if it changes nothing)",
            )
        if self.guarantee is None:
            raise InvalidDefinition(
                self._title,
                "a write must name the service's guarantee of 'at most once': idempotency-key,"
                " unique-constraint, transaction, not-after, or person where there is none",
            )
        if self.guarantee is Guarantee.IDEMPOTENCY_KEY and self.key_valid_for_ms == 0:
            raise InvalidDefinition(
                self._title,
                "say how long the service honours the key: key_valid_for_ms (or FOREVER)",
            )
        if self.guarantee is Guarantee.NOT_AFTER and not self.not_after:
            raise InvalidDefinition(self._title, "the guarantee not-after needs not_after=True")
        if self.guarantee is Guarantee.PERSON and self.side_effect is not SideEffect.IRREVERSIBLE:
            raise InvalidDefinition(
                self._title, "a write that only a person can clear up is of the class irreversible"
            )
        if not self.can_query and self.takeover is None:
            raise InvalidDefinition(
                self._title,
                "a write must say who finds out about an unknown result, after a time-out or a"
                " cancellation: a query(arguments, call), or the person or queue in takeover='...'",
            )
        if self.side_effect is SideEffect.IRREVERSIBLE and self.approval is Approval.NEVER:
            raise InvalidDefinition(
                self._title,
                "an irreversible write takes an exact confirmation: approval='never' is not for it",
            )
        if self.retry is not None:
            raise InvalidDefinition(
                self._title,
                "a write is not made again by a retry policy, since its failure proves nothing: use"
                " Commit(..., attempts=n) for a service that says 'nothing happened, try again'",
            )

    @property
    def needs_approval(self) -> bool:
        """Whether the contract itself wants a person's consent. Undeclared: every write does."""
        approval = self.approval or Approval.ON_WRITE
        return approval is Approval.ALWAYS or (
            approval is Approval.ON_WRITE and self.side_effect.writes
        )

    def amount_of(self, arguments: Mapping[str, Json]) -> int | None:
        """The amount that a call is about, in minor units; None where none is declared."""
        value = None if self.amount is None else arguments.get(self.amount)
        return value if type(value) is int else None

    def approvers_for(self, arguments: Mapping[str, Json]) -> int:
        """How many people have to agree to a call. An amount that cannot be read takes two, and one
        that flows back counts as one that flows out.
        """
        if self.second_approver_above is None:
            return self.approvers
        amount = self.amount_of(arguments)
        much = amount is None or abs(amount) > self.second_approver_above
        return 2 if much else self.approvers

    @property
    def retries(self) -> Retry | None:
        """How a failed call is made again; None where it is not."""
        if self.retry is None and self.side_effect is SideEffect.REPLAYABLE:
            return Retry()
        return self.retry

    @property
    def recovery(self) -> str:
        """Who finds out about an unknown effect first: `query` or `human`."""
        return "query" if self.can_query else "human"

    def validate(self, arguments: dict[str, Json]) -> Validated | Invalid:
        """Check arguments strictly and bring them to their normal form; nothing is ever assumed
        valid.

        Additional fields, booleans as numbers and texts as numbers are refused. Never raises: a
        validator that raises makes the arguments invalid.
        """
        if self.input is None:
            return Validated(arguments, arguments)
        try:
            model = self.input.model_validate_json(dumps(arguments), strict=True, extra="forbid")
            return Validated(model, _object(model.model_dump(mode="json")))
        except Exception as error:
            return Invalid(f"{type(error).__name__}: {_first_line(error)}")

    def revive(self, arguments: dict[str, Json]) -> Arguments:
        """Return the input model of arguments that were validated before and stored.

        It is the caller's own: a tool may change what it is given, and the next call sees nothing
        of that.
        """
        if self.input is None:
            return deepcopy(arguments)
        return self.input.model_validate_json(dumps(arguments), strict=True)

    def check_output(self, value: object) -> Json:
        """Bring a result to its normal form; raise `NotCanonical` where it violates the
        contract.
        """
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json")
        if self.output is not None:
            try:
                value = self.output.model_validate_json(canonical(value), strict=True).model_dump(
                    mode="json"
                )
            except NotCanonical:
                raise
            except Exception as error:
                raise NotCanonical(
                    f"the result violates its contract: {_first_line(error)}"
                ) from None
        return normal(value)

    def intent_of(self, arguments: Arguments, run: RunFacts) -> str | None:
        """Name the business intent of a call; None where the contract declares none.

        Raises `InvalidDefinition` where the contract's function gives no text that can be stored.
        """
        if self.intent is None:
            return None
        key = self.intent(arguments, run)
        if not isinstance(key, str) or not 0 < len(dumps(key)) - 2 <= MAX_INTENT_CHARACTERS:
            raise InvalidDefinition(
                self._title,
                f"intent(arguments, run) must give 1 to {MAX_INTENT_CHARACTERS} ASCII characters"
                " (one outside of ASCII counts as 6 or 12): name the object and the action",
            )
        return key

    def stable(self, value: Json) -> Json:
        """Return a value without the fields that the contract marks as volatile."""
        if self.volatile and isinstance(value, dict):
            return {k: v for k, v in value.items() if k not in self.volatile}
        return value


@lru_cache(maxsize=1_024)
def contract_hash(contract: ToolContract) -> str:
    """Identify what a contract declares in words and shapes: who agreed to a call of it agreed to
    this, and to no other text or shape under the same name and version.
    """
    shapes = [
        None if model is None else model.model_json_schema()
        for model in (contract.input, contract.output)
    ]
    declared: list[Json] = [
        contract.name,
        contract.version,
        contract.description,
        contract.side_effect.value,
        contract.amount,
        contract.approvers,
        contract.second_approver_above,
        contract.requester_approves,
        *map(normal, shapes),
    ]
    return digest("contract", canonical(declared))


def is_model(value: object) -> bool:
    """Whether a value is a pydantic model: the class, not an instance."""
    return isinstance(value, type) and issubclass(value, BaseModel)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


#: What a contract's fields hold, beside its functions and numbers: (field, check, words for it).
_OF_TYPE: Final[tuple[tuple[str, Callable[[Any], bool], str], ...]] = (
    ("description", _is_text, "a text"),
    ("version", _is_text, "a text"),
    ("permission", lambda value: value is None or _is_text(value), "a text"),
    ("input", lambda value: value is None or is_model(value), "a pydantic model"),
    ("output", lambda value: value is None or is_model(value), "a pydantic model"),
    ("side_effect", lambda value: isinstance(value, SideEffect), "a SideEffect"),
    ("approval", lambda value: value is None or isinstance(value, Approval), "an Approval"),
    ("guarantee", lambda value: value is None or isinstance(value, Guarantee), "a Guarantee"),
    ("amount", lambda value: value is None or _is_text(value), "the name of an argument"),
    ("requester_approves", lambda value: isinstance(value, bool), "True or False"),
    ("stores_failures", lambda value: isinstance(value, bool), "True or False"),
    ("confirmed_by_query", lambda value: isinstance(value, bool), "True or False"),
    (
        "takeover",
        lambda value: value is None or (_is_text(value) and bool(value.strip())),
        "the name of a person or a queue",
    ),
    (
        "volatile",
        lambda value: isinstance(value, frozenset) and all(map(_is_text, value)),
        "a set of names",
    ),
)


@dataclass(frozen=True, slots=True)
class Validated:
    """Arguments that passed: as the tool takes them, and as JSON in normal form."""

    model: Arguments
    json: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Invalid:
    """Arguments that did not pass."""

    problem: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A contract with its functions, which only the shell calls.

    `execute(arguments, call)` performs the call, synchronously or as a coroutine; `query(arguments,
    call)` asks the service whether the intent took effect and must not change anything;
    `shadow(arguments, call)` stands in for a write in a shadow run: it gives the receipt that the
    service would give, and must not change anything either. `report_secret` is what the service
    signs its reports with. `compensation` undoes the write where its run is cancelled meanwhile.
    """

    contract: ToolContract
    execute: Callable[..., Any]
    query: Callable[..., Any] | None = None
    shadow: Callable[..., Any] | None = None
    report_secret: str | None = field(default=None, repr=False)
    compensation: Compensation | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.contract, ToolContract):
            raise InvalidDefinition(
                getattr(self.execute, "__name__", "tool"),
                "a function alone is no tool: declare its contract with fleet.tool(...)",
            )
        must_be_functions(
            f"tool {self.name!r}", execute=self.execute, query=self.query, shadow=self.shadow
        )
        writes = self.contract.side_effect.writes
        if self.shadow is not None and not writes:
            raise InvalidDefinition(
                f"tool {self.name!r}", "a read needs no shadow: it is made in a shadow run too"
            )
        if self.report_secret is not None and not (
            isinstance(self.report_secret, str)
            and len(self.report_secret) >= SHORTEST_SECRET
            and writes
        ):
            raise InvalidDefinition(
                f"tool {self.name!r}",
                f"report_secret is a text of at least {SHORTEST_SECRET} characters, for a write",
            )
        if self.contract.can_query != (self.query is not None):
            raise InvalidDefinition(
                f"tool {self.name!r}", "can_query and the query function must come together"
            )
        self._check_compensation()

    def _check_compensation(self) -> None:
        undo: object = self.compensation
        title = f"tool {self.name!r}"
        if undo is None:
            if self.contract.side_effect is SideEffect.COMPENSABLE:
                raise InvalidDefinition(
                    title,
                    "a compensable write must say how it is undone: compensation=Compensation("
                    "tool=<the tool that undoes it>, arguments=<a function of what was written>)",
                )
            return
        if not isinstance(undo, Compensation):
            raise InvalidDefinition(title, "compensation must be a Compensation")
        if not self.contract.side_effect.writes:
            raise InvalidDefinition(title, "it changes nothing, so that there is nothing to undo")
        if undo.tool.name == self.name:
            raise InvalidDefinition(title, "it cannot undo itself")

    @property
    def name(self) -> str:
        """The name that a model must give, compared exactly."""
        return self.contract.name

    @property
    def calls(self) -> int:
        """How many tool calls must be left for one call of it: those that read what it changes,
        that confirm it, and that may have to undo it included.
        """
        undo = self.compensation
        undoing = 0 if undo is None else undo.tool.calls + (undo.original is not None)
        return 1 + self.contract.confirmed_by_query + undoing


@dataclass(frozen=True, slots=True)
class Compensation:
    """How a write is undone: by another write, with an intent, a key, a query and a time limit of
    its own.

    `arguments(arguments, result, original, run)` makes the undoing call's arguments of those of the
    write, its recorded result and what `original` has read; it must be pure. `original(arguments,
    call)` reads, right before the write is recorded, the state that undoing has to restore; that is
    a call, too, and must not change anything.
    """

    tool: Tool
    arguments: Callable[[Arguments, Json, Json, RunFacts], Mapping[str, Json]]
    original: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        must_be_tool("a compensation", self.tool)
        title = f"the compensation by {self.tool.name!r}"
        if not callable(self.arguments):
            raise InvalidDefinition(title, "arguments must be a function of what was written")
        must_be_functions(title, original=self.original)
        contract = self.tool.contract
        if not contract.side_effect.writes:
            raise InvalidDefinition(title, "a write is undone by a write")
        if contract.needs_approval:
            raise InvalidDefinition(
                title, "nobody is asked while a write is undone: declare approval='never'"
            )
        if self.tool.compensation is not None:
            raise InvalidDefinition(title, "what undoes a write has no compensation itself")


def must_be_tool(title: str, tool: object) -> None:
    """Refuse what is no declared tool, such as a bare function, with `InvalidDefinition`."""
    if not isinstance(tool, Tool):
        name = getattr(tool, "__name__", repr(tool))
        raise InvalidDefinition(
            title, f"{name!r} is no tool: declare its contract with fleet.tool(...)"
        )


def must_be_functions(title: str, **functions: object) -> None:
    """Refuse what is neither a function nor left out, with `InvalidDefinition`."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise InvalidDefinition(title, f"{name} must be a function, not {function!r}")


def fingerprint(version: int, contract: ToolContract, arguments: Json) -> str:
    """Identify a proposal: state version, tool and normalised arguments, volatile fields left
    out.
    """
    return digest(str(version), contract.name, dumps(contract.stable(arguments)))


def action_digest(contract: ToolContract, arguments: Json) -> str:
    """Identify an action whatever the state version, for the detector of lacking progress."""
    return digest("action", contract.name, dumps(contract.stable(arguments)))


def _sorted_set(items: list[Any]) -> list[Any]:
    unique = {canonical(item): item for item in items}
    return [unique[key] for key in sorted(unique)]


_T = TypeVar("_T")
#: A list that is a set by business meaning: deduplicated and sorted before the fingerprint.
SetOf = Annotated[list[_T], AfterValidator(_sorted_set)]


def _object(value: object) -> dict[str, Json]:
    out = normal(value)
    assert isinstance(out, dict)
    return out


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
