// Server-sent events of a chat, and the answer that grows out of them.

import { Refused } from "./service";

export interface Call {
  id: string;
  name: string;
  arguments: string;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number } | null;
}

export interface Answer {
  text: string;
  thinking: string;
  calls: Call[];
  finish: string | null;
  usage: Usage | null;
  firstMs: number | null;
  lastMs: number | null;
}

interface Delta {
  content?: string | null;
  reasoning?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[] | null;
}

interface Chunk {
  choices?: { delta?: Delta; finish_reason?: string | null }[];
  usage?: Usage | null;
  error?: { message: string };
}

export function emptyAnswer(): Answer {
  return { text: "", thinking: "", calls: [], finish: null, usage: null, firstMs: null, lastMs: null };
}

/** The data of each event. Throws if the stream ends before `[DONE]`. */
export async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body
    .pipeThrough(new TextDecoderStream() as unknown as TransformStream<Uint8Array, string>)
    .getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused("The answer broke off: the connection was closed before its end.", 0);
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop() ?? "";
    for (const line of blocks.flatMap((block) => block.split("\n"))) {
      if (!line.startsWith("data: ")) continue; // a comment, which keeps the connection open
      if (line === "data: [DONE]") return;
      yield line.slice(6);
    }
  }
}

/** Adds one event to the answer. Throws what the service says went wrong. */
export function take(answer: Answer, data: string, sinceStartMs: number): void {
  const chunk = JSON.parse(data) as Chunk;
  if (chunk.error) throw new Refused(chunk.error.message, 0);
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  answer.finish = choice.finish_reason ?? answer.finish;
  const delta = choice.delta ?? {};
  const thought = delta.reasoning ?? delta.reasoning_content ?? "";
  answer.thinking += thought;
  answer.text += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  if (thought || delta.content || delta.tool_calls?.length) {
    answer.firstMs ??= sinceStartMs;
    answer.lastMs = sinceStartMs;
  }
}
