/** The blob store over its HTTP service, content streamed in both directions. */

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { BlobError, InvalidArgument } from "./errors.js";
import { localUp } from "./local_up.js";

const DEFAULT_URL = "http://127.0.0.1:8085";
const SILENT_MS = 30_000;
const FROM_STATUS: Record<number, string> = { 401: "blob_unauthorized", 404: "blob_not_found" };

/** One stored blob. */
export interface BlobRef {
  /** `sha256:` and 64 hex digits. Requests refer to the blob by it. */
  blob_id: string;
  media_type: string;
  size: number;
}

export interface BlobOptions {
  /** Ends the call with the signal's reason. */
  signal?: AbortSignal;
}

/** Client of a blob service. Calls are not repeated: if an error is `retryable`, the same call may be. */
export class Blobs {
  readonly #url: string;
  readonly #token: () => string;
  readonly #deployment: string;

  /** @internal */
  constructor(url: string | undefined, token: string | undefined, readonly until: (signal: AbortSignal | undefined) => AbortSignal) {
    const env = process.env;
    const up = url || env["TOKENBUS_BLOBS_URL"] ? undefined : localUp();
    this.#url = (url || env["TOKENBUS_BLOBS_URL"] || up?.blobs_url || DEFAULT_URL).replace(/\/+$/, "");
    if (!/^https?:\/\/[^/?#]+[^?#]*$/.test(this.#url)) throw new InvalidArgument("blobs: must be http://host:port or https://host:port");
    this.#deployment = up?.deployment ?? "";
    // Read at each call: the file may change.
    const file = env["TOKENBUS_BLOB_TOKEN_FILE"];
    this.#token = () => token ?? env["TOKENBUS_BLOB_TOKEN"] ?? (file ? readFileSync(file, "utf8").trim() : "");
  }

  /** Store content, whole or in pieces. The same content is always the same blob. Throws BlobError, and what `content` throws. */
  async put(content: Uint8Array | string | AsyncIterable<Uint8Array>, mediaType = "application/octet-stream", options: BlobOptions = {}): Promise<BlobRef> {
    const whole = typeof content === "string" || content instanceof Uint8Array;
    const answer = await this.#call("PUT", "", options, { body: content as BodyInit, headers: { "content-type": mediaType }, ...(whole ? {} : { duplex: "half" }) });
    if (answer.status !== 201) throw await this.#problem(answer, "/blobs");
    return (await answer.json()) as BlobRef;
  }

  /** A blob's whole content, checked against its id. Throws as `chunks`. */
  async get(blobId: string, options: BlobOptions = {}): Promise<Uint8Array> {
    const chunks: Uint8Array[] = [];
    for await (const chunk of this.chunks(blobId, options)) chunks.push(chunk);
    return Buffer.concat(chunks);
  }

  /**
   * A blob's content in pieces, the last of which comes once all matched the id. Keeps the blob for as long as a run may
   * be open. Throws BlobError.
   */
  async *chunks(blobId: string, options: BlobOptions = {}): AsyncGenerator<Uint8Array, void, undefined> {
    const answer = await this.#call("GET", `/${checked(blobId)}`, options);
    if (answer.status !== 200) throw await this.#problem(answer, blobId);
    const hash = createHash("sha256");
    let held: Uint8Array | undefined;
    try {
      for await (const chunk of answer.body ?? []) {
        hash.update(chunk);
        if (held) yield held;
        held = chunk;
      }
    } catch (error) {
      options.signal?.throwIfAborted();
      await this.check(blobId, options); // the service cuts the answer if the content is not the id's
      throw new BlobError("blob_unavailable", `${this.#url}: ${String(error)}`, { cause: error });
    }
    const found = `sha256:${hash.digest("hex")}`;
    if (found !== blobId) throw new BlobError("blob_corrupt", `${blobId}: the received content is ${found}`);
    if (held) yield held;
  }

  /** The reference of a stored blob, without its content. Throws BlobError. */
  async head(blobId: string, options: BlobOptions = {}): Promise<BlobRef> {
    const answer = await this.#call("HEAD", `/${checked(blobId)}`, options);
    if (answer.status !== 200) throw await this.#problem(answer, blobId);
    return { blob_id: blobId, media_type: answer.headers.get("content-type") ?? "", size: Number(answer.headers.get("content-length")) };
  }

  /** Keep the blob for as long as a run may be open, from now. Throws BlobError. */
  lease(blobId: string, options: BlobOptions = {}): Promise<void> {
    return this.#post(blobId, "lease", options);
  }

  /** Have the service compare the content with the id. Throws BlobError, with the code `blob_corrupt` if they differ. */
  check(blobId: string, options: BlobOptions = {}): Promise<void> {
    return this.#post(blobId, "check", options);
  }

  async #post(blobId: string, what: string, options: BlobOptions): Promise<void> {
    const answer = await this.#call("POST", `/${checked(blobId)}/${what}`, options);
    if (answer.status !== 204) throw await this.#problem(answer, blobId);
  }

  async #call(method: string, path: string, { signal }: BlobOptions, init: RequestInit & { duplex?: string } = {}): Promise<Response> {
    const token = this.#token();
    const silent = new AbortController();
    const timer = setTimeout(() => silent.abort(new BlobError("blob_unavailable", `${this.#url}: no answer within ${SILENT_MS} ms`)), SILENT_MS);
    const until = this.until(signal);
    try {
      const headers = { ...(init.headers as Record<string, string>), ...(token ? { authorization: `Bearer ${token}` } : {}) };
      const answer = await fetch(`${this.#url}/blobs${path}`, { ...init, method, headers, signal: AbortSignal.any([until, silent.signal]) });
      const other = answer.headers.get("tokenbus-deployment");
      if (this.#deployment && other !== this.#deployment) throw new BlobError("blob_unavailable", `${this.#url}: what answers there is not the blob service of this deployment`);
      return answer;
    } catch (error) {
      until.throwIfAborted();
      if (error instanceof BlobError || !(error instanceof TypeError)) throw error;
      throw new BlobError("blob_unavailable", `${this.#url}: ${String(error.cause ?? error)}`, { cause: error });
    } finally {
      clearTimeout(timer);
    }
  }

  async #problem(answer: Response, what: string): Promise<BlobError> {
    const text = await answer.text().catch(() => "");
    try {
      const { code, message } = JSON.parse(text) as { code: string; message: string };
      return new BlobError(code, message.includes(what) ? message : `${what}: ${message}`);
    } catch {
      return new BlobError(FROM_STATUS[answer.status] ?? "blob_unavailable", `${what}: HTTP ${answer.status}`);
    }
  }
}

/** An id ends up in a path. */
function checked(blobId: string): string {
  if (!/^sha256:[0-9a-f]{64}$/.test(blobId)) throw new BlobError("blob_refused", `${JSON.stringify(blobId.slice(0, 80))}: no blob id`);
  return blobId;
}
