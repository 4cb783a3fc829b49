"""Worker settings: retries, stages and queues, ports; tools and MCP servers."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta
from msgspec.structs import force_setattr

from tokenbus.events.requests import InputFormat
from tokenbus.events.waits import ApprovalRule
from tokenbus_services.settings.types import Count, HttpUrl, ImportPath, Seconds, Table, WaitSeconds


class RetrySettings(Table, frozen=True, kw_only=True):
    """How often and how soon a turn is retried."""

    max_attempts: Count = 4
    """Maximum tries of one turn that end in a provider error, including the first."""
    max_losses: Count = 10
    """Maximum tries of one turn whose worker was lost; bounds a request that kills its workers. From the third on they
    are delayed like tries that end in a provider error.
    """
    base_delay_s: Seconds = 0.5
    max_delay_s: Seconds = 30.0


class StageSettings(Table, frozen=True, kw_only=True):
    """How the ordered stages and work queues run."""

    lease_s: Seconds = 3.0
    """A killed worker is noticed within this time; must be longer than any pause of a healthy worker."""
    tick_s: Seconds = 0.25
    max_records: Count = 256
    linger_ms: Annotated[float, Meta(ge=0, le=100)] = 3.0
    """Maximum time the source batches, when its process is saturated; no delay while it is less than half busy."""
    max_added_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    """How long a chunk may be held back to be written with others, of a run whose request does not say it. What begins
    or ends a block, and a block's first chunk, goes at once.
    """
    chained: bool = False
    """Whether `tokenbus up` runs fetcher, normalizer and parser as one process, the pipeline."""
    drain_s: Annotated[float, Meta(ge=0)] = 300.0
    """How long a stopping worker, which takes nothing new, lets provider calls, tool calls and the gateway's answers
    finish. Of what is left then, a run whose request says `on_failure = "continue"` goes on in another fetcher from its
    text, any other as after a lost worker, and an answer of the gateway ends with `gateway_restarting`.
    """


class HttpSettings(Table, frozen=True, kw_only=True):
    """HTTP server of each service: health, readiness and metrics pages, and the blob store. One port per service."""

    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    """Host names of the blob service and the gateway in addition to `localhost`, addresses and `blobs.service_url`."""
    connections: Count = 256
    """Maximum connections per worker; beyond it, the one that has waited longest without a complete request is
    closed.
    """
    fetcher: int = 8081
    normalizer: int = 8082
    parser: int = 8083
    tools: int = 8084
    blobs: int = 8085
    recorder: int = 8086
    policy: int = 8087
    pipeline: int = 8089
    gateway: int = 8088
    webhooks: int = 8090


class OtelSettings(Table, frozen=True, kw_only=True):
    """If the table exists, even empty, workers send traces and metrics by OTLP over HTTP. The standard variables
    (`OTEL_…`) apply to keys that are left out. See docs/operate/telemetry.md.
    """

    endpoint: HttpUrl | None = None
    """The collector's address, without `/v1/traces`. None: that of the environment, else `http://localhost:4318`."""
    sample: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of the runs that are traced, of those whose publisher does not decide it. None: that of the environment,
    else 1.
    """
    content: bool = False
    """Whether spans hold messages, answers, and arguments and results of tools."""


DEFAULT_TOOL_TIMEOUT_S = 60.0
"""Timeout of a tool call if neither the tool nor the request sets one."""


class _Approved(Table, frozen=True, kw_only=True):
    """Which calls wait for a person's decision before they run. See docs/guides/waiting.md."""

    approval: ApprovalRule = "never"
    """`always`, `never`, or which arguments a call has that waits."""
    approval_timeout_s: WaitSeconds = 86_400.0
    """How long a call waits for the decision."""
    approval_on_deadline: Literal["allow", "deny"] = "deny"
    """What is decided if nobody decides until then."""


class PythonTool(_Approved, frozen=True, kw_only=True, tag="python", tag_field="kind"):
    """A Python callable, `module:function`, sync or async."""

    call: str
    description: str = ""
    parameters: dict[str, object] = {}
    format: InputFormat | None = None
    """Set if the input is free text instead of JSON; the tool gets it as its argument ``input``."""
    timeout_s: Seconds | None = None
    answer_timeout_s: WaitSeconds = 86_400.0
    """How long a question of the tool waits for its answer, if it does not say so itself."""
    questions: Literal["rerun", "wait"] = "rerun"
    """What a call does that asks. ``rerun``: it ends, and runs again from its start with the answer. ``wait``: it waits
    in its worker, within its timeout.
    """


class Outbound(Table, frozen=True, kw_only=True):
    """An address that the deployment calls. It must be public, but for what is allowed here."""

    url: str
    headers: dict[str, str] = {}
    header_env: dict[str, str] = {}
    """Header name to the environment variable with its value (a token, say)."""
    allow_private: bool = False
    """Also allow loopback and private addresses. A name that resolves only to other addresses is rejected."""
    allow_networks: tuple[str, ...] = ()
    """Also allow these networks, in CIDR notation; the only way to reach a link-local or cloud metadata address."""


class _ApprovedOutbound(Outbound, frozen=True, kw_only=True):
    """`_Approved` of what is called over HTTP. A struct has one base with fields."""

    approval: ApprovalRule = "never"
    approval_timeout_s: WaitSeconds = 86_400.0
    approval_on_deadline: Literal["allow", "deny"] = "deny"


class HttpTool(_ApprovedOutbound, frozen=True, kw_only=True, tag="http", tag_field="kind"):
    """An HTTP endpoint: the arguments are the JSON body, the response is the result."""

    method: Literal["POST", "PUT", "GET"] = "POST"
    signing_env: str | None = None
    """Environment variable with a secret. If set, each call carries the run's id, tenant and metadata, signed."""
    description: str = ""
    parameters: dict[str, object] = {}
    format: InputFormat | None = None
    """Set if the input is free text instead of JSON; the tool gets it as its argument ``input``."""
    timeout_s: Seconds | None = None


class ClientTool(_Approved, frozen=True, kw_only=True, tag="client", tag_field="kind"):
    """A tool that a client of the run executes: a browser or a device. See docs/guides/waiting.md."""

    description: str = ""
    parameters: dict[str, object] = {}
    format: InputFormat | None = None
    """Set if the input is free text instead of JSON."""
    result: dict[str, object] | None = None
    """JSON Schema of the result; None: any text."""
    timeout_s: WaitSeconds = DEFAULT_TOOL_TIMEOUT_S
    """How long a call waits for its result."""


DEFAULT_CHILD_TIMEOUT_S = 3600.0
_TASK: dict[str, object] = {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]}


class RunTool(_Approved, frozen=True, kw_only=True, tag="run", tag_field="kind"):
    """A tool whose calls begin child runs: a model's answer is the result. See docs/guides/child-runs.md."""

    provider: str
    """The NAME of a configured provider."""
    model: str
    instructions: str = ""
    """The child run's system message. Its user message is the call's arguments: the text of the only one, or JSON."""
    tools: tuple[str, ...] = ()
    """Names of tools that the child run may call, such as it could be in a request."""
    max_tokens: Count | None = None
    max_tool_depth: Annotated[int, Meta(ge=0, le=1000)] = 10
    policies: tuple[str, ...] = ()
    """Policies that judge the child run, besides those of its parent's request and of its route."""
    visible: bool = True
    """Whether the child run's text is visible, on the topics and in its log."""
    description: str = ""
    parameters: dict[str, object] = {}
    """Without it or a ``format``: an object with one text, ``task``."""
    format: InputFormat | None = None
    """Set if the input is free text instead of JSON."""
    timeout_s: WaitSeconds = DEFAULT_CHILD_TIMEOUT_S
    """Deadline of the child run. That of its parent holds too."""

    def __post_init__(self) -> None:
        if not self.parameters and self.format is None:
            force_setattr(self, "parameters", _TASK)


ToolSettings = PythonTool | HttpTool | ClientTool | RunTool


class McpStdio(_Approved, frozen=True, kw_only=True, tag="stdio", tag_field="kind"):
    """An MCP server that runs as a child process of each tool executor."""

    command: str
    args: tuple[str, ...] = ()
    env_pass: tuple[str, ...] = ()
    """Environment variables passed to it, in addition to PATH, HOME and the like."""
    prefix: str | None = None
    """Prefix of its tools' names; None: the table's name and `__`."""
    connect_timeout_s: Seconds = 30.0
    """Timeout to start and list its tools."""
    timeout_s: Seconds | None = None
    """Timeout of each call."""
    answer_timeout_s: WaitSeconds = 86_400.0
    """How long a question of one of its tools waits for its answer."""


class McpHttp(_ApprovedOutbound, frozen=True, kw_only=True, tag="http", tag_field="kind"):
    """An MCP server reached over Streamable HTTP."""

    prefix: str | None = None
    """Prefix of its tools' names; None: the table's name and `__`."""
    connect_timeout_s: Seconds = 30.0
    """Timeout to connect and list its tools."""
    timeout_s: Seconds | None = None
    """Timeout of each call."""
    answer_timeout_s: WaitSeconds = 86_400.0
    """How long a question of one of its tools waits for its answer."""


McpSettings = McpStdio | McpHttp


Notice = Literal["run.completed", "run.failed", "run.incomplete", "run.cancelled", "run.waiting"]
"""What a webhook can tell: how a run ended, and that it waits for somebody."""
NOTICES: tuple[Notice, ...] = get_args(Notice)


class WebhookSettings(Outbound, frozen=True, kw_only=True):
    """A receiver of webhooks, signed as Standard Webhooks says. See docs/operate/webhooks.md."""

    secret_env: str
    """Environment variable with the secret that signs, `whsec_` and base64; several, separated by spaces, all sign."""
    every_run: bool = False
    """Whether it is told of all runs. Else of those whose request or key of the gateway names it."""
    events: tuple[Notice, ...] = NOTICES
    """What it is told."""
    timeout_s: Seconds = 15.0
    """Time for one try, from the connection to the answer's status."""
    retry_s: Annotated[float, Meta(gt=0, le=7 * 86_400)] = 86_400.0
    """A delivery that failed is tried again for so long, then kept aside (`tokenbus dead`)."""
    at_once: Annotated[int, Meta(ge=1, le=100)] = 8
    """Tries at once, for each worker."""
    most_waiting: Count = 100_000
    """Deliveries that may wait for it. Beyond, new ones are kept aside at once."""


# Policies, and the runs they apply to.


class PolicySettings(Table, frozen=True, kw_only=True):
    """A policy that can apply to runs. See docs/guides/policy-stage.md."""

    use: ImportPath
    """`module:Class`, a `tokenbus.policy` StreamProcessor, or `module:function`. The module may be in the directory of
    the settings file."""
    options: dict[str, object] = {}
    """Options declared by the class."""
    on_error: Literal["block", "pass"] = "block"
    """What happens to a run if its policy fails: it ends, or continues without the policy."""
    timeout_s: Seconds = 30.0
    """Timeout of each policy call."""


class PolicyRoute(Table, frozen=True, kw_only=True):
    """Which runs have policies. Criteria left out match every run. A run that matches several routes gets the policies
    of all, in this order.
    """

    policies: tuple[str, ...] = ()
    """Names from `[policies.NAME]`, in the order in which they judge what comes out."""
    input_policies: tuple[str, ...] = ()
    """Those that judge what goes in: the texts of a request, or of what is appended to a session."""
    providers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    """Exact names, or prefixes followed by `*` (`gpt-5*`)."""
    tenants: tuple[str, ...] = ()
    """Values of `metadata.tenant`."""
    metadata: dict[str, str] = {}
    """Text values that the run's metadata must contain."""
