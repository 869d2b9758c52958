"""What a tool is: an executable contract with conservative defaults.

A contract says what goes in, what comes out, what kind of side effect a call has, how long it may
take, who must agree, what the business intent of a call is, and how doubt about it is resolved.
Undeclared means: an irreversible write, serial, the shortest time limit, with approval. Pure: the
functions that a `Tool` carries are called by the shell alone, `intent`, `allow` and the checks on
arguments and results excepted, which must be pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel

from handrail.agent.canonical import Json, canonical, digest, dumps, normal
from handrail.agent.errors import InvalidDefinition, NotCanonical

FOREVER: Final = 2**53
SHORTEST_TIMEOUT_MS: Final = 5_000
DEFAULT_SETTLE_MS: Final = 5_000
DEFAULT_OUTPUT_BYTES: Final = 64_000
#: An intent key is indexed: what names a business object and an action is short.
MAX_INTENT_CHARACTERS: Final = 1_000


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
    """On whose behalf a run acts: its subject and what that subject may do."""

    subject: str = "anonymous"
    permissions: frozenset[str] = frozenset()

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
    `stores_failures`: a refusal is stored under the key and given again. `not_after`: the service
    refuses a request that arrives after the deadline in it. `settle_after_ms`: how long after the
    last moment to send it a write may still land. `pending_for_ms`: how long the answer "pending"
    is normal. `intent(arguments, run)` names the business object and the action, never run, step or
    time. `postcondition(arguments, result)` and `belongs_to(result, run)` judge a result before it
    enters the state. `public(arguments, result)` gives harmless facts for the trace. `volatile`
    names fields that take no part in fingerprints and comparisons.
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
    permission: str | None = None
    allow: Callable[[Arguments, RunFacts], Permit] | None = None
    intent: Callable[[Arguments, RunFacts], str] | None = None
    guarantee: Guarantee | None = None
    key_valid_for_ms: int = 0
    stores_failures: bool = False
    not_after: bool = False
    can_query: bool = False
    settle_after_ms: int = DEFAULT_SETTLE_MS
    pending_for_ms: int = 60_000
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
        if self.side_effect.writes:
            self._check_write()

    @property
    def _title(self) -> str:
        return f"tool {self.name!r}"

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

    @property
    def needs_approval(self) -> bool:
        """Whether the contract itself wants a person's consent. Undeclared: every write does."""
        approval = self.approval or Approval.ON_WRITE
        return approval is Approval.ALWAYS or (
            approval is Approval.ON_WRITE and self.side_effect.writes
        )

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
        """Return the input model of arguments that were validated before and stored."""
        if self.input is None:
            return arguments
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
    call)` asks the service whether the intent took effect and must not change anything.
    """

    contract: ToolContract
    execute: Callable[..., Any]
    query: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.contract, ToolContract):
            raise InvalidDefinition(
                getattr(self.execute, "__name__", "tool"),
                "a function alone is no tool: declare its contract with fleet.tool(...)",
            )
        must_be_functions(f"tool {self.name!r}", execute=self.execute, query=self.query)
        if self.contract.can_query != (self.query is not None):
            raise InvalidDefinition(
                f"tool {self.name!r}", "can_query and the query function must come together"
            )

    @property
    def name(self) -> str:
        """The name that a model must give, compared exactly."""
        return self.contract.name


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
