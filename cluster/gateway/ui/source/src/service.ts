// What the pages ask of the service that they come from. Addresses are relative, so that a proxy may put the service
// under any path. The key lives in this object, in the memory of the tab, and nowhere else.

export class Refused extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

export interface Model {
  id: string;
  owned_by: string;
  parent: string | null;
  root: string;
  version?: string;
  max_model_len: number;
}

export interface Rank {
  rank: number;
  pid: number;
}

export interface Group {
  id: string;
  state: "loading" | "serving" | "draining";
  node: string;
  pid: number;
  ranks: Rank[];
  running: number;
  waiting: number;
  outstanding_tokens: number;
  kv_usage: number;
  kv_tokens: number;
  stalled_s: number;
  loaded_bytes: number;
  total_bytes: number;
  fetching: string;
  load_s: number;
  disk_disabled: string | null;
}

export interface Tenant {
  name: string;
  limits: Record<string, number | string | string[] | null>;
}

export interface Load {
  num_requests_running: number;
  num_requests_waiting: number;
  groups?: number;
  groups_serving?: number;
  groups_wanted?: number;
  why?: string;
  requests_held?: number;
  redis?: string;
}

export type Health = "ready" | "asleep" | "starting" | "unreachable";

export class Service {
  key = "";

  async models(): Promise<Model[]> {
    return (await this.json<{ data: Model[] }>("v1/models")).data;
  }

  async groups(): Promise<Group[]> {
    return (await this.json<{ data: Group[] }>("admin/groups")).data;
  }

  async tenants(): Promise<Tenant[]> {
    return (await this.json<{ data: Tenant[] }>("admin/tenants")).data;
  }

  async load(): Promise<Load> {
    return await this.json<Load>("load");
  }

  async metrics(): Promise<string> {
    return await (await this.ask("metrics")).text();
  }

  async version(): Promise<string> {
    return (await this.json<{ version: string }>("version")).version;
  }

  /** Never throws. */
  async health(): Promise<Health> {
    try {
      const answer = await fetch("readyz", { cache: "no-store" });
      if (!answer.ok) return "starting";
      return ((await answer.json()) as { asleep?: boolean }).asleep ? "asleep" : "ready";
    } catch {
      return "unreachable";
    }
  }

  async has(path: string): Promise<boolean> {
    try {
      return (await fetch(path, { method: "HEAD" })).ok;
    } catch {
      return false;
    }
  }

  /** The body of the answer. onId: called with the id of the request, for `tandem explain`, also if it is refused. */
  async chat(body: unknown, signal: AbortSignal, onId: (id: string) => void): Promise<ReadableStream<Uint8Array>> {
    const headers = { "content-type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(body), signal };
    const answer = await this.ask("v1/chat/completions", options, onId);
    if (answer.body === null) throw new Refused("The answer has no body.", 0);
    return answer.body;
  }

  private async json<T>(path: string): Promise<T> {
    return (await (await this.ask(path)).json()) as T;
  }

  private async ask(path: string, options: RequestInit = {}, onId: (id: string) => void = () => {}): Promise<Response> {
    const headers = new Headers(options.headers);
    if (this.key) headers.set("authorization", `Bearer ${this.key}`);
    let answer: Response;
    try {
      answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new Refused("The service does not answer. Does it still run?", 0);
    }
    onId(answer.headers.get("x-request-id") ?? "");
    if (!answer.ok) throw await refusalOf(answer);
    return answer;
  }
}

async function refusalOf(answer: Response): Promise<Refused> {
  const text = await answer.text().catch(() => "");
  return new Refused(messageIn(text) ?? `The service answered with status ${answer.status}.`, answer.status);
}

function messageIn(text: string): string | null {
  try {
    return (JSON.parse(text) as { error: { message: string } }).error.message;
  } catch {
    return null;
  }
}

export function said(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
