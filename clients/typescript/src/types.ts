// Written by scripts/generate_types.py from shared/tokenbus/schemas. Do not edit.

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
 * A block ends. ``cut`` says that its content is only what came before the stream broke off.
 */
export interface BlockComplete {
  type: "block_complete";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  block: number;
  kind: "image" | "text" | "thinking" | "tool_call" | "tool_result";
  content?: string;
  tool_id?: string;
  tool_name?: string;
  arguments?: string;
  input?: Record<string, unknown>;
  input_error?: string;
  is_error?: boolean;
  signature?: string;
  opaque?: Record<string, string>;
  opaque_blobs?: Record<string, string>;
  image?: ImageRef;
  blob_id?: string;
  images?: ImageRef[];
  cut?: boolean;
  provider_extra?: Record<string, unknown>[];
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
  block: number;
  kind: "image" | "text" | "thinking" | "tool_call" | "tool_result";
  tool_id?: string;
  tool_name?: string;
  prompt?: string;
}

export type BlockTopicEvent = BlockStarted | ImagePreview | BlockComplete | ToolProgress;

/**
 * Stop a run, at the provider's socket too.
 */
export interface Cancel {
  type: "cancel";
  run: string;
  reason?: string;
  heard_through?: number;
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
  finish: "content_filter" | "error" | "length" | "pause" | "stop" | "tool_use" | "unknown";
  timing: Timing;
  finish_raw?: string;
  usage?: Usage;
  provider?: string;
  model?: string;
  response_id?: string;
  provider_extra?: Record<string, unknown>[];
  reason?: string;
  heard_through?: number;
}

/**
 * A piece of one block's content. A block's chunks concatenate to exactly its content.
 *
 * For a tool call the pieces with ``tool_call_part == "input"`` concatenate to its ``arguments``.
 */
export interface Chunk {
  type: "chunk";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  block: number;
  kind: "image" | "text" | "thinking" | "tool_call" | "tool_result";
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
  finish: "content_filter" | "error" | "length" | "pause" | "stop" | "tool_use" | "unknown";
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
 * One decision of one policy. ``n`` counts those of a run from 0 without a gap.
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

export interface DocumentPart {
  type: "document";
  source: Base64Source | UrlSource | BlobSource | FileSource;
  title?: string;
  cache?: boolean;
}

/**
 * One failure. ``code`` is the stable name for programs, ``kind`` (``class`` on the wire) its family.
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
 * A provider's own content item (a server-run tool, say), sent back to it as it came.
 */
export interface ExtraPart {
  type: "extra";
  name: string;
  json: string;
}

/**
 * A provider and a model to ask when those before it failed.
 */
export interface Fallback {
  provider: string;
  model: string;
  extra?: Record<string, unknown>;
}

/**
 * Media that lie with the provider already, in its own file store.
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
  on_failure?: "before_first_visible" | "continue" | "fail" | "restart";
  deadline_s?: number;
  participant?: string;
  metadata?: Record<string, unknown>;
  extra?: Record<string, unknown>;
  prefill?: PrefillOptions;
  convert_unsigned_thinking_to_text?: boolean;
  names_in_text?: boolean;
  images?: ImageOptions;
  record?: boolean;
  visible?: boolean;
  policies?: string[];
  fallback?: Fallback[];
}

/**
 * Asks for images in the answer. See docs/guides/images.md. Values use the provider's own words; an option
 * that a provider does not have is refused by name, never left out.
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
 * An image; in an assistant's message one that the model made, with the data that its provider wants back.
 */
export interface ImagePart {
  type: "image";
  source: Base64Source | UrlSource | BlobSource | FileSource;
  cache?: boolean;
  opaque?: Record<string, string>;
  opaque_blobs?: Record<string, string>;
}

/**
 * How far an image is; between its block's start and end. The next one, and the image itself, replace it.
 */
export interface ImagePreview {
  type: "image_preview";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  block: number;
  kind: "image";
  index: number;
  image: ImageRef;
}

/**
 * Where an image is: by blob id, or inline where it lies in no blob; and what is known of how it was made.
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
 * The stream was cut short: what came before stands, the rest never came.
 */
export interface Incomplete {
  type: "incomplete";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  finish: "content_filter" | "error" | "length" | "pause" | "stop" | "tool_use" | "unknown";
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

export interface Message {
  role: "assistant" | "system" | "tool" | "user";
  content: string | (TextPart | ThinkingPart | ImagePart | DocumentPart | ToolCallPart | ToolResultPart | ExtraPart)[];
  participant?: string;
}

/**
 * The answer must be JSON that meets ``schema``. Each provider takes some of JSON Schema, and refuses the rest.
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

export type PublicEvent = Chunk | BlockStarted | ImagePreview | BlockComplete | ToolProgress | Started | Retrying | Restarted | UsageReported | Completed | Incomplete | RunFailedEvent | Cancelled;

export type Request = Generate | Cancel;

/**
 * An attempt failed after visible text, and the turn starts over. Blocks from ``drop_from`` on are void.
 */
export interface Restarted {
  type: "restarted";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  error: ErrorInfo;
  next_attempt: number;
  delay_ms: number;
  drop_from: number;
}

/**
 * An attempt failed, and the next one follows. Blocks from ``drop_from`` on are void; none of them was heard.
 */
export interface Retrying {
  type: "retrying";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  error: ErrorInfo;
  next_attempt: number;
  delay_ms: number;
  drop_from: number;
  continues?: boolean;
  fallback?: ProviderModel;
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
  finish: "content_filter" | "error" | "length" | "pause" | "stop" | "tool_use" | "unknown";
  timing: Timing;
  finish_raw?: string;
  usage?: Usage;
  provider?: string;
  model?: string;
  response_id?: string;
  provider_extra?: Record<string, unknown>[];
  error: ErrorInfo;
}

export type RunTopicEvent = Started | Retrying | Restarted | UsageReported | Completed | Incomplete | RunFailedEvent | Cancelled;

/**
 * The run was accepted; its first event.
 */
export interface Started {
  type: "started";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  provider: string;
  model: string;
  metadata?: Record<string, unknown>;
  fallback?: ProviderModel[];
  notes?: string[];
  participant?: string;
}

export type TerminalEvent = Completed | Incomplete | RunFailedEvent | Cancelled;

/**
 * Text; ``cache`` asks the provider to keep the prompt up to here, where it can.
 *
 * ``opaque`` of this and other parts is what a provider wants back with them, as `block_complete` told it; its ``api``
 * and ``provider`` say whose it is, and no other gets it. ``opaque_blobs`` names blobs that hold further values.
 */
export interface TextPart {
  type: "text";
  text: string;
  cache?: boolean;
  opaque?: Record<string, string>;
  opaque_blobs?: Record<string, string>;
}

/**
 * How much the model may think; a provider takes what it knows of these.
 */
export interface Thinking {
  enabled?: boolean;
  budget_tokens?: number;
  effort?: "high" | "low" | "medium" | "minimal";
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
 * Milliseconds since the run was accepted; None where it never came so far.
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
}

/**
 * A call that the model made; ``arguments`` is the raw string as it came.
 */
export interface ToolCallPart {
  type: "tool_call";
  tool_id: string;
  tool_name: string;
  arguments: string;
  opaque?: Record<string, string>;
  opaque_blobs?: Record<string, string>;
}

/**
 * Which tool the model must call, by name.
 */
export interface ToolChoice {
  name: string;
}

/**
 * How far a tool's call is, in the tool's own words; after the call's block, and before its result.
 *
 * Told as it comes, and not all of it: a newer one replaces those before it. It is no part of any block.
 */
export interface ToolProgress {
  type: "tool_progress";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  block: number;
  tool_id: string;
  tool_name: string;
  progress: number;
  total?: number;
  message?: string;
}

/**
 * What a tool gave back for the call ``tool_id``.
 */
export interface ToolResultPart {
  type: "tool_result";
  tool_id: string;
  content: string | (TextPart | ImagePart)[];
  tool_name?: string;
  is_error?: boolean;
  cache?: boolean;
}

/**
 * Media that the provider fetches.
 */
export interface UrlSource {
  type: "url";
  url: string;
}

/**
 * Tokens of one turn or one run. None means that the provider did not say.
 *
 * ``input`` counts what the provider calls its input as it stands, caches included only where the
 * provider includes them; nothing is derived but ``total`` where the provider gives it itself.
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
 * Token counts of the turn just ended, or of an attempt that another goes on from, and of the run so far.
 */
export interface UsageReported {
  type: "usage";
  run: string;
  seq: number;
  turn: number;
  attempt: number;
  usage: Usage;
  total: Usage;
  model?: string;
  response_id?: string;
  provider?: string;
}
