/** Where the server is: `redis://`, `rediss://` (TLS), a master that Sentinels name, or a Cluster. */

import { readFileSync } from "node:fs";
import { createClient } from "@redis/client";
import { Cluster, type Place } from "./cluster.js";
import { InvalidArgument, ServerUnavailable } from "./errors.js";

/** A server that answers nothing for so long is away. */
export const ANSWER_MS = 5_000;
const OPTIONS = ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"];

/** What became of a connection to the server. */
export interface Status {
  state: "connected" | "lost";
  /** `commands`, or `reader`: it waits for new entries. */
  connection: "commands" | "reader";
  /** Why it was lost. */
  error?: unknown;
}

export class Server {
  readonly #socket: Record<string, unknown> = {};
  readonly #login: Record<string, unknown> = {};
  readonly #nodes: Place[] = [];
  readonly #master: string = "";
  /** Keys are on several nodes: a connection that waits for entries waits for those of one node. */
  readonly cluster: boolean;

  /** `url` as Python's client takes it, without `unix://`. Throws InvalidArgument. */
  constructor(url: string, readonly onStatus: (status: Status) => void) {
    const [, tls, topology, login = "", nodes = "", path = "", query = ""] =
      /^(?:redis|valkey)(s)?(?:\+(sentinel|cluster))?:\/\/(?:([^@/]*)@)?([^/?#]+)\/?([^?#]*)(?:\?([^#]*))?$/.exec(url) ?? [];
    if (!nodes) throw new InvalidArgument("url: this client knows redis://, redis+sentinel:// and redis+cluster://, each with rediss for TLS; no unix://");
    const [user, password] = login.split(":").map(decodeURIComponent);
    const segments = path.split("/").filter((one) => one !== "").map(decodeURIComponent);
    const sentinel = topology === "sentinel";
    this.cluster = topology === "cluster";
    this.#nodes = nodes.split(",").map((node) => {
      const [, ip6, host, port] = /^(?:\[([0-9A-Fa-f:.]+)\]|([^:[\]]+))(?::(\d+))?$/.exec(node) ?? [];
      if (!ip6 && !host) throw new InvalidArgument("url: must be host, host:port or [IPv6]:port, several with commas between");
      return { host: ip6 ?? host ?? "", port: Number(port ?? (sentinel ? 26379 : 6379)) };
    });
    if (sentinel && !segments[0]) throw new InvalidArgument("url: the master's name is missing: redis+sentinel://host:26379/mymaster");
    if (!topology && this.#nodes.length > 1) throw new InvalidArgument("url: several hosts need redis+sentinel:// or redis+cluster://");
    if (this.cluster && segments.length > 0) throw new InvalidArgument("url: a cluster has no databases and no master's name");
    if (sentinel) this.#master = segments.shift() ?? "";
    if (segments.length > 1 || !/^\d*$/.test(segments[0] ?? "")) throw new InvalidArgument("url: the database must be a number");
    this.#login = { ...(user ? { username: user } : {}), ...(password ? { password } : {}), ...(this.cluster ? {} : { database: Number(segments[0] ?? 0) }) };
    if (tls) this.#socket = { tls: true, ...tlsOptions(new URLSearchParams(query)) };
    else if (query) throw new InvalidArgument("url: options are for rediss:// alone");
  }

  /**
   * A client that is not connected yet. In a Cluster it sends each command to the node of its key, or with `near` all to
   * the node of that key. Throws ServerUnavailable if nobody names the node.
   */
  async client(near?: string): Promise<ReturnType<typeof this.plain>> {
    const [first = { host: "", port: 0 }] = this.#nodes;
    if (!this.cluster) return this.plain(this.#master ? await this.#named() : first);
    const cluster = new Cluster(this.#nodes, (place) => this.plain(place));
    if (near === undefined) return cluster.commands;
    await cluster.connect();
    return this.plain(cluster.placeOf(near));
  }

  /** @internal */
  plain(place: Place) {
    return createClient({ ...this.#login, name: "tokenbus-ts", socket: this.#to(place) });
  }

  #to(place: Place) {
    return { ...this.#socket, ...place, connectTimeout: ANSWER_MS, reconnectStrategy: false as const };
  }

  /** Ask one Sentinel after the other who the master is. Sentinels have no database, and users of their own. */
  async #named(): Promise<Place> {
    for (const sentinel of this.#nodes) {
      const client = createClient({ name: "tokenbus-ts", socket: this.#to(sentinel) });
      client.on("error", () => {});
      try {
        await client.connect();
        const found = (await client.sendCommand(["SENTINEL", "GET-MASTER-ADDR-BY-NAME", this.#master])) as [string, string] | null;
        if (found) return { host: found[0], port: Number(found[1]) };
      } catch {
        // the next one may know
      } finally {
        if (client.isOpen) client.destroy();
      }
    }
    throw new ServerUnavailable(`no Sentinel names the master ${this.#master}`);
  }
}

function tlsOptions(query: URLSearchParams): Record<string, unknown> {
  const options: Record<string, unknown> = {};
  const files = { ssl_ca_certs: "ca", ssl_certfile: "cert", ssl_keyfile: "key" } as const;
  for (const [name, value] of query) {
    if (!OPTIONS.includes(name)) throw new InvalidArgument(`url: only ${OPTIONS.join(", ")} can be set here`);
    if (name in files) options[files[name as keyof typeof files]] = readFileSync(value);
    else if (name === "ssl_cert_reqs" && ["none", "optional", "required"].includes(value)) options["rejectUnauthorized"] = value !== "none";
    else if (name === "ssl_check_hostname" && ["true", "false"].includes(value)) {
      if (value === "false") options["checkServerIdentity"] = () => undefined;
    } else throw new InvalidArgument(`url: ${name} cannot be ${value}`);
  }
  return options;
}
