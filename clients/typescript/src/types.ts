// Written by scripts/generate_types.py from shared/tokenbus/schemas. Do not edit.

/**
 * The answer to a question of a tool.
 */
export interface Answer {
  type: "answer";
  run: string;
  wait: string;
  decision_id: string;
  by?: string;
  door?: "ag_ui" | "ai_sdk" | "anthropic" | "bus" | "chat" | "cli" | "console" | "deadline" | "gemini" | "http" | "openai";
  metadata?: Record<string, unknown>;
  decision?: "accept" | "cancel" | "decline";
  content?: Record<string, unknown>;
}

/**
 * The provider began to answer, before the attempt's first block. Left out if it names neither model nor id.
 */
export interface Answering {
  type: "answering";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  model?: string;
  response_id?: string;
  provider?: string;
}

/**
 * Something that a client puts into a session. A repeated ``id`` is the same append.
 */
export interface Append {
  type: "append";
  session: string;
  item: SessionMessage | Interrupt | Withdraw | Configure | Rewrite | Delete;
  id?: string;
  metadata?: Record<string, unknown>;
}

/**
 * The append was accepted. Its fate follows as `Delivered` or `Returned`.
 */
export interface Appended {
  type: "appended";
  session_seq: number;
  at_ms: number;
  run?: string;
  run_seq?: number;
  session?: string;
  tenant?: string;
  made?: string;
  append: string;
  item: SessionMessage | Interrupt | Withdraw | Configure | Rewrite | Delete;
  item_bytes?: number;
}

/**
 * Whether a tool call may run.
 */
export interface Approval {
  type: "approval";
  run: string;
  wait: string;
  decision_id: string;
  by?: string;
  door?: "ag_ui" | "ai_sdk" | "anthropic" | "bus" | "chat" | "cli" | "console" | "deadline" | "gemini" | "http" | "openai";
  metadata?: Record<string, unknown>;
  decision: "allow" | "deny";
  reason?: string;
  arguments?: Record<string, unknown>;
}

/**
 * A sound by blob id, or inline if it is not in a blob.
 */
export interface AudioRef {
  media_type: string;
  blob_id?: string;
  base64?: string;
  size_bytes?: number;
  audio_id?: string;
  expires_at?: number;
}

/**
 * Media inside the request.
 */
export interface Base64Source {
  type: "base64";
  media_type: string;
  data: string;
}

/**
 * Media in the blob store, loaded when the provider request is built.
 */
export interface BlobSource {
  type: "blob";
  blob_id: string;
  media_type: string;
  size_bytes?: number;
}

/**
 * A block ends. ``cut`` means that the stream broke off and the content is incomplete.
 */
export interface BlockComplete {
  type: "block_complete";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  block: number;
  kind: "audio" | "image" | "server_tool" | "text" | "thinking" | "tool_call" | "tool_result";
  content?: string;
  tool_id?: string;
  tool_name?: string;
  arguments?: string;
  input?: Record<string, unknown>;
  input_error?: string;
  free_text?: boolean;
  is_error?: boolean;
  signature?: string;
  opaque?: Record<string, string>;
  opaque_blobs?: Record<string, string>;
  item?: string;
  phase?: string;
  image?: ImageRef;
  audio?: AudioRef;
  blob_id?: string;
  images?: ImageRef[];
  cut?: boolean;
  provider_extra?: Record<string, unknown>[];
}

/**
 * What the provider says of a tool that it runs, between the start and the end of the tool's block.
 */
export interface BlockProgress {
  type: "block_progress";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  block: number;
  kind: "audio" | "image" | "server_tool" | "text" | "thinking" | "tool_call" | "tool_result";
  status: string;
  tool_id?: string;
  tool_name?: string;
}

/**
 * A block begins; its chunks follow.
 */
export interface BlockStarted {
  type: "block_start";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  block: number;
  kind: "audio" | "image" | "server_tool" | "text" | "thinking" | "tool_call" | "tool_result";
  tool_id?: string;
  tool_name?: string;
  prompt?: string;
  free_text?: boolean;
  item?: string;
  phase?: string;
}

export type BlockTopicEvent = BlockStarted | ImagePreview | BlockProgress | BlockComplete | ToolProgress;

/**
 * Stop a run, and close its connection to the provider.
 */
export interface Cancel {
  type: "cancel";
  run: string;
  reason?: string;
  heard_through?: number;
  heard_characters?: number;
}

/**
 * The run was cancelled.
 */
export interface Cancelled {
  type: "cancelled";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  finish: "content_filter" | "error" | "length" | "pause" | "requires_action" | "stop" | "tool_use" | "unknown";
  timing: Timing;
  finish_raw?: string;
  usage?: Usage;
  provider?: string;
  model?: string;
  response_id?: string;
  provider_extra?: Record<string, unknown>[];
  reason?: string;
  heard_through?: number;
  heard_characters?: number;
}

/**
 * A child run has ended, and its text is the result of its call, which follows.
 */
export interface ChildEnded {
  type: "child_ended";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  block: number;
  tool_id: string;
  tool_name: string;
  child: string;
  status: "cancelled" | "completed" | "failed" | "incomplete" | "lost";
  error?: ErrorInfo;
}

/**
 * A tool call begins a child run. If the run ends first, the child may never begin.
 */
export interface ChildStarted {
  type: "child_started";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  block: number;
  tool_id: string;
  tool_name: string;
  child: string;
}

/**
 * A piece of one block's content. A block's chunks concatenate to exactly its content.
 *
 * For a tool call, the pieces with ``tool_call_part == "input"`` concatenate to its ``arguments``.
 */
export interface Chunk {
  type: "chunk";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  block: number;
  kind: "audio" | "image" | "server_tool" | "text" | "thinking" | "tool_call" | "tool_result";
  text: string;
  visible: boolean;
  depth: number;
  tool_call_part?: "id" | "input" | "name";
  tool_id?: string;
  tool_name?: string;
}

export type ChunkTopicEvent = Chunk;

/**
 * The provider finished, and so did the run.
 */
export interface Completed {
  type: "completed";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  finish: "content_filter" | "error" | "length" | "pause" | "requires_action" | "stop" | "tool_use" | "unknown";
  timing: Timing;
  finish_raw?: string;
  usage?: Usage;
  provider?: string;
  model?: string;
  response_id?: string;
  provider_extra?: Record<string, unknown>[];
  stop_string?: string;
}

/**
 * What one argument must be, in words of JSON Schema. Of a value that is no number, the limits say nothing.
 */
export interface Condition {
  enum?: unknown[];
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
  not?: Excluded;
}

/**
 * The session's configuration from now on, in place of the one before. Creates the session if there is none.
 */
export interface Configure {
  type: "configure";
  request: Record<string, unknown>;
  messages?: Message[];
  when_busy?: "enqueue" | "interrupt" | "reject" | "steer";
  together?: boolean;
  history?: HistoryBound;
  judged?: string;
}

/**
 * The configuration changed, for messages that are appended from now on. The first event of a session.
 */
export interface Configured {
  type: "configured";
  session_seq: number;
  at_ms: number;
  run?: string;
  run_seq?: number;
  session?: string;
  tenant?: string;
  made?: string;
  append: string;
  item: SessionMessage | Interrupt | Withdraw | Configure | Rewrite | Delete;
  item_bytes?: number;
}

/**
 * One decision of one policy. ``n`` counts a run's decisions from 0 without gaps.
 */
export interface Decided {
  type: "decision";
  run: string;
  n: number;
  turn: number;
  attempt: number;
  policy: string;
  action: "block" | "error" | "replace" | "terminate";
  reason?: string;
  block?: number;
  tool_id?: string;
  tool_name?: string;
  original?: string;
  final?: string;
}

export type DecisionTopicEvent = Decided;

/**
 * Delete the session: its events, its runs and its history. An open run is cancelled first. Afterwards the name is
 * free again.
 */
export interface Delete {
  type: "delete";
}

/**
 * The session is gone, by this append. On the topic alone: its log is gone too.
 */
export interface Deleted {
  type: "deleted";
  session_seq: number;
  at_ms: number;
  run?: string;
  run_seq?: number;
  session?: string;
  tenant?: string;
  made?: string;
  append: string;
}

/**
 * The append took effect: in the run ``run``, if it concerns one.
 */
export interface Delivered {
  type: "delivered";
  session_seq: number;
  at_ms: number;
  run?: string;
  run_seq?: number;
  session?: string;
  tenant?: string;
  made?: string;
  append: string;
  turn?: number;
}

/**
 * A document, such as a PDF. ``title`` names it for the model.
 */
export interface DocumentPart {
  type: "document";
  source: Base64Source | UrlSource | BlobSource | FileSource;
  title?: string;
  cache?: boolean | "1h" | "5m";
  citations?: boolean;
  context?: string;
  extra?: Record<string, Record<string, unknown>>;
}

/**
 * One failure. ``code`` is the stable name for programs; ``kind`` (``class`` on the wire) is its category.
 */
export interface ErrorInfo {
  code: string;
  class: "auth" | "content_filter" | "internal" | "invalid_request" | "limit" | "network" | "not_found" | "overloaded" | "protocol" | "rate_limit" | "server" | "timeout" | "tool" | "unknown";
  message: string;
  retryable?: boolean;
  retry_after_s?: number;
  status?: number;
  where?: string;
  raw?: string;
  request_id?: string;
}

/**
 * What an argument must not be.
 */
export interface Excluded {
  enum: unknown[];
}

/**
 * A provider-specific content item (a server-side tool, say), sent back unchanged.
 */
export interface ExtraPart {
  type: "extra";
  name: string;
  json: string;
}

/**
 * A provider and model to try if the earlier ones failed.
 */
export interface Fallback {
  provider: string;
  model: string;
  extra?: Record<string, unknown>;
}

/**
 * Media already stored with the provider's file API.
 */
export interface FileSource {
  type: "file";
  file_id: string;
  media_type?: string;
}

/**
 * One generation request. A repeated ``id`` is the same run.
 */
export interface Generate {
  type: "generate";
  provider: string;
  model: string;
  messages: Message[];
  id?: string;
  parent?: string;
  mode?: "chat" | "prefill";
  system?: string | TextPart[];
  tools?: Tool[];
  tool_choice?: "any" | "auto" | "none" | ToolChoice;
  max_tokens?: number;
  temperature?: number;
  top_p?: number;
  stop?: string[];
  thinking?: Thinking;
  output_schema?: OutputSchema;
  stream?: boolean;
  max_tool_depth?: number;
  tool_timeout_s?: number;
  on_failure?: "before_first_output" | "before_first_visible" | "continue" | "fail" | "restart";
  deadline_s?: number;
  max_added_ms?: number;
  durability?: "replicated" | "server";
  participant?: string;
  metadata?: Record<string, unknown>;
  extra?: Record<string, unknown>;
  prefill?: PrefillOptions;
  unsigned_thinking?: "drop" | "error" | "text";
  names_in_text?: boolean;
  images?: ImageOptions;
  record?: boolean;
  visible?: boolean;
  commentary?: "hidden" | "visible";
  policies?: string[];
  input_policies?: string[];
  webhooks?: string[];
  fallback?: Fallback[];
  json_object?: boolean;
  parallel_tool_calls?: boolean;
  seed?: number;
  top_k?: number;
  frequency_penalty?: number;
  presence_penalty?: number;
  user_id?: string;
  traceparent?: string;
}

/**
 * A tool's input is text of a grammar, which the provider enforces.
 */
export interface GrammarFormat {
  type: "grammar";
  syntax: "lark" | "regex";
  definition: string;
}

/**
 * How much of a session's history a request gets: about so many ``tokens``, and what happens to the rest.
 *
 * - ``oldest``: the messages of the oldest runs are left out, with a note.
 * - ``summary``: a model summarises them in a run of its own, which this run waits for.
 * - ``provider``: all is sent, and the provider is told to compact it when it has so many tokens. With an API that
 *   cannot do that, as ``oldest``.
 */
export interface HistoryBound {
  tokens: number;
  how?: "oldest" | "provider" | "summary";
  provider?: string;
  model?: string;
}

/**
 * Requests images in the answer. See docs/guides/images.md.
 *
 * Values are in the provider's terms. An option that a provider does not have is rejected by name, never ignored.
 */
export interface ImageOptions {
  size?: string;
  aspect_ratio?: string;
  quality?: string;
  format?: "jpeg" | "png" | "webp";
  background?: "auto" | "opaque" | "transparent";
  model?: string;
  count?: number;
  previews?: number;
  mask?: ImagePart;
  deliver?: "base64" | "blob";
}

/**
 * An image. In an assistant message, one that the model generated, with the data that its provider wants back.
 */
export interface ImagePart {
  type: "image";
  source: Base64Source | UrlSource | BlobSource | FileSource;
  cache?: boolean | "1h" | "5m";
  opaque?: Record<string, string>;
  opaque_blobs?: Record<string, string>;
  detail?: "auto" | "high" | "low";
  extra?: Record<string, Record<string, unknown>>;
}

/**
 * A preview of an unfinished image, between its block's start and end. The next preview, or the image, replaces
 * it.
 */
export interface ImagePreview {
  type: "image_preview";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  block: number;
  kind: "image";
  index: number;
  image: ImageRef;
}

/**
 * An image by blob id, or inline if it is not in a blob, and what is known about how it was made.
 */
export interface ImageRef {
  media_type: string;
  blob_id?: string;
  base64?: string;
  revised_prompt?: string;
  prompt?: string;
  model?: string;
  size?: string;
  quality?: string;
  size_bytes?: number;
  width?: number;
  height?: number;
  draft?: boolean;
}

/**
 * The stream was cut off: the earlier output stands, the rest never came.
 */
export interface Incomplete {
  type: "incomplete";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  finish: "content_filter" | "error" | "length" | "pause" | "requires_action" | "stop" | "tool_use" | "unknown";
  timing: Timing;
  finish_raw?: string;
  usage?: Usage;
  provider?: string;
  model?: string;
  response_id?: string;
  provider_extra?: Record<string, unknown>[];
  reason: string;
  error?: ErrorInfo;
}

/**
 * End the session's open run as `cancelled`; what waits starts the next one.
 *
 * ``heard_through`` and ``heard_characters``: as in `Cancel`, for the open run, or for the last one if none is open:
 * speech may end after the run did.
 */
export interface Interrupt {
  type: "interrupt";
  heard_through?: number;
  heard_characters?: number;
  run?: string;
}

/**
 * One message of a conversation. ``participant`` names its speaker; see docs/guides/prefill.md.
 */
export interface Message {
  role: "assistant" | "system" | "tool" | "user";
  content: string | (TextPart | ThinkingPart | ImagePart | DocumentPart | ToolCallPart | ToolResultPart | ExtraPart)[];
  participant?: string;
  id?: string;
  extra?: Record<string, Record<string, unknown>>;
}

/**
 * The answer must be JSON matching ``schema``. Each provider supports a subset of JSON Schema and rejects the
 * rest.
 */
export interface OutputSchema {
  schema: Record<string, unknown>;
  name?: string;
  strict?: boolean;
}

/**
 * How a conversation is written as one text (mode prefill); see docs/guides/prefill.md, "Writing".
 */
export interface PrefillOptions {
  delimiter?: string;
  end_of_turn?: string;
  stop_on_end_of_turn?: boolean;
  first_user_message?: string;
  names_once?: boolean;
  unnamed?: string[];
}

/**
 * A configured provider, and a model as requests name it.
 */
export interface ProviderModel {
  provider: string;
  model: string;
}

export type PublicEvent = Chunk | BlockStarted | ImagePreview | BlockProgress | BlockComplete | ToolProgress | Started | Answering | Retrying | Restarted | Waiting | Resumed | ChildStarted | ChildEnded | UsageReported | Completed | Incomplete | RunFailedEvent | Cancelled;

export type Request = Generate | Cancel | Append | Approval | Answer | ToolResult;

/**
 * An attempt failed after visible text, and the turn starts over. Blocks from ``drop_from`` on are void.
 */
export interface Restarted {
  type: "restarted";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  error: ErrorInfo;
  next_attempt: number;
  delay_ms: number;
  drop_from: number;
}

/**
 * What the run waited for was decided, and by whom. Later decisions on it change nothing.
 */
export interface Resumed {
  type: "resumed";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  wait: string;
  what: "answer" | "approval" | "tool_result";
  block: number;
  tool_id: string;
  tool_name: string;
  decision: "accept" | "allow" | "cancel" | "decline" | "deny" | "result";
  decision_id: string;
  by?: string;
  door: "ag_ui" | "ai_sdk" | "anthropic" | "bus" | "chat" | "cli" | "console" | "deadline" | "gemini" | "http" | "openai";
  at_ms: number;
  reason?: string;
  arguments?: string;
  content?: string;
}

/**
 * An attempt failed, and another follows. Blocks from ``drop_from`` on are void; none of them was visible.
 */
export interface Retrying {
  type: "retrying";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  error: ErrorInfo;
  next_attempt: number;
  delay_ms: number;
  drop_from: number;
  continues?: boolean;
  fallback?: ProviderModel;
}

/**
 * The append had no effect and never will have one.
 */
export interface Returned {
  type: "returned";
  session_seq: number;
  at_ms: number;
  run?: string;
  run_seq?: number;
  session?: string;
  tenant?: string;
  made?: string;
  append: string;
  reason: "busy" | "exists" | "heard_too_far" | "newer_run" | "not_waiting" | "nothing_open" | "queue_full" | "refused" | "rejected" | "withdrawn";
  problem?: string;
}

/**
 * Replace the history by other messages. Runs and events stay as they are. Returned as `busy` while a run is open,
 * unless ``through`` is an earlier one.
 */
export interface Rewrite {
  type: "rewrite";
  messages: Message[];
  through?: string;
  as_of?: number;
  judged?: string;
}

/**
 * The run ended; its terminal event is the one before. ``status`` `lost`: nothing of the run is left.
 */
export interface RunEnded {
  type: "run_ended";
  session_seq: number;
  at_ms: number;
  run?: string;
  run_seq?: number;
  session?: string;
  tenant?: string;
  made?: string;
  status: "cancelled" | "completed" | "failed" | "incomplete" | "lost";
}

/**
 * The run ended in an error.
 */
export interface RunFailedEvent {
  type: "failed";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  finish: "content_filter" | "error" | "length" | "pause" | "requires_action" | "stop" | "tool_use" | "unknown";
  timing: Timing;
  finish_raw?: string;
  usage?: Usage;
  provider?: string;
  model?: string;
  response_id?: string;
  provider_extra?: Record<string, unknown>[];
  error: ErrorInfo;
}

export type RunTopicEvent = Started | Answering | Retrying | Restarted | Waiting | Resumed | ChildStarted | ChildEnded | UsageReported | Completed | Incomplete | RunFailedEvent | Cancelled;

export type SessionEvent = Configured | Appended | Delivered | Returned | RunEnded;

/**
 * A message to the model, or several. It starts a run, or waits for the end of the open one.
 */
export interface SessionMessage {
  type: "message";
  content?: string | (TextPart | ThinkingPart | ImagePart | DocumentPart | ToolCallPart | ToolResultPart | ExtraPart)[];
  role?: "system" | "user";
  participant?: string;
  when_busy?: "enqueue" | "interrupt" | "reject" | "steer";
  heard_through?: number;
  heard_characters?: number;
  now?: boolean;
  messages?: Message[];
  request?: Record<string, unknown>;
  run?: boolean;
  judged?: string;
}

export type SessionTopicEvent = Configured | Appended | Delivered | Returned | RunEnded | Deleted;

/**
 * The run was accepted; its first event.
 */
export interface Started {
  type: "started";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  provider: string;
  model: string;
  metadata?: Record<string, unknown>;
  fallback?: ProviderModel[];
  notes?: string[];
  participant?: string;
  parent?: string;
}

export type TerminalEvent = Completed | Incomplete | RunFailedEvent | Cancelled;

/**
 * A tool's input is any text.
 */
export interface TextFormat {
  type: "text";
}

/**
 * Text.
 *
 * ``cache``, here and in other parts, asks the provider to cache the prompt up to here, if it can. ``extra`` has
 * further fields of the part, by API.
 *
 * ``opaque``, here and in other parts, is data to send back to the provider, copied from `block_complete`. Its ``api``
 * and ``provider`` name the origin; no other provider gets it. ``opaque_blobs`` names blobs with further values.
 */
export interface TextPart {
  type: "text";
  text: string;
  cache?: boolean | "1h" | "5m";
  opaque?: Record<string, string>;
  opaque_blobs?: Record<string, string>;
  extra?: Record<string, Record<string, unknown>>;
}

/**
 * How much the model may think. Each provider uses the options it supports.
 */
export interface Thinking {
  enabled?: boolean;
  budget_tokens?: number;
  effort?: "high" | "low" | "max" | "medium" | "minimal" | "none" | "xhigh";
  display?: "omitted" | "summarized";
}

/**
 * The model's own thinking from an earlier turn, with the data that its provider wants back.
 */
export interface ThinkingPart {
  type: "thinking";
  text?: string;
  signature?: string;
  opaque?: Record<string, string>;
  opaque_blobs?: Record<string, string>;
}

/**
 * Milliseconds since the run was accepted; None if that point was never reached.
 */
export interface Timing {
  first_byte_ms?: number;
  first_visible_ms?: number;
  total_ms: number;
}

/**
 * A tool that the model may call. ``parameters`` is a JSON schema of type object.
 */
export interface Tool {
  name: string;
  description?: string;
  parameters?: Record<string, unknown>;
  format?: TextFormat | GrammarFormat;
  strict?: boolean;
  extra?: Record<string, Record<string, unknown>>;
  approval?: "always" | "never" | Record<string, Condition> | Record<string, Condition>[];
  kind?: "client";
  result?: Record<string, unknown>;
  timeout_s?: number;
}

/**
 * A call made by the model; ``arguments`` is the raw string, unchanged.
 */
export interface ToolCallPart {
  type: "tool_call";
  tool_id: string;
  tool_name: string;
  arguments: string;
  free_text?: boolean;
  opaque?: Record<string, string>;
  opaque_blobs?: Record<string, string>;
  extra?: Record<string, Record<string, unknown>>;
}

/**
 * The name of the tool that the model must call.
 */
export interface ToolChoice {
  name: string;
}

/**
 * A tool call's progress, as reported by the tool; after the call's block and before its result.
 *
 * Best effort: not every report is published, and a newer one replaces those before it. It is not part of any block.
 */
export interface ToolProgress {
  type: "tool_progress";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  block: number;
  tool_id: string;
  tool_name: string;
  progress: number;
  total?: number;
  message?: string;
}

/**
 * The result of a tool that a client runs.
 */
export interface ToolResult {
  type: "tool_result";
  run: string;
  wait: string;
  decision_id: string;
  by?: string;
  door?: "ag_ui" | "ai_sdk" | "anthropic" | "bus" | "chat" | "cli" | "console" | "deadline" | "gemini" | "http" | "openai";
  metadata?: Record<string, unknown>;
  content?: unknown;
  is_error?: boolean;
}

/**
 * The result of the tool call ``tool_id``.
 */
export interface ToolResultPart {
  type: "tool_result";
  tool_id: string;
  content: string | (TextPart | ImagePart)[];
  tool_name?: string;
  is_error?: boolean;
  cache?: boolean | "1h" | "5m";
  extra?: Record<string, Record<string, unknown>>;
}

/**
 * Media that the provider fetches.
 */
export interface UrlSource {
  type: "url";
  url: string;
  media_type?: string;
}

/**
 * Tokens of one turn or one run. None: the provider did not report it.
 *
 * ``input`` is the provider's own input count, so it includes cached tokens only if the provider includes them.
 * Nothing is derived; ``total`` is set only if the provider reports it.
 */
export interface Usage {
  input?: number;
  output?: number;
  reasoning?: number;
  cache_read?: number;
  cache_write?: number;
  total?: number;
  raw?: Record<string, unknown>;
}

/**
 * Token counts of the turn just ended, or of an attempt that another continues, and of the run so far.
 */
export interface UsageReported {
  type: "usage";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  usage: Usage;
  total: Usage;
  model?: string;
  response_id?: string;
  provider?: string;
}

/**
 * The run waits for somebody: for leave to run a call, for an answer, or for the result of a client's tool.
 *
 * `Resumed` follows when that ends, unless the run ends first. Several may be open at once.
 */
export interface Waiting {
  type: "waiting";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  session?: string;
  wait: string;
  what: "answer" | "approval" | "tool_result";
  block: number;
  tool_id: string;
  tool_name: string;
  deadline_ms: number;
  on_deadline?: "allow" | "cancel" | "deny";
  arguments?: string;
  schema?: Record<string, unknown>;
  text?: string;
  url?: string;
  tenant?: string;
}

/**
 * Take back a message that still waits.
 */
export interface Withdraw {
  type: "withdraw";
  append: string;
}
