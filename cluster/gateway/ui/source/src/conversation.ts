// Turns of a conversation, the settings beside it, and the body of a request made of both.

import type { Answer, Call } from "./stream";

export interface UserTurn {
  role: "user";
  text: string;
}

export interface AssistantTurn extends Answer {
  role: "assistant";
  model: string;
  state: "streaming" | "done" | "stopped" | "failed";
  error: string | null;
  requestId: string;
}

export interface ToolTurn {
  role: "tool";
  callId: string;
  name: string;
  text: string;
}

export type Turn = UserTurn | AssistantTurn | ToolTurn;

export interface Settings {
  system: string;
  temperature: string;
  top_p: string;
  top_k: string;
  min_p: string;
  max_tokens: string;
  min_tokens: string;
  presence_penalty: string;
  frequency_penalty: string;
  repetition_penalty: string;
  seed: string;
  stop: string;
  reasoning_effort: string;
  tools: string;
  tool_choice: string;
}

export const NO_SETTINGS: Settings = {
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  min_tokens: "",
  presence_penalty: "",
  frequency_penalty: "",
  repetition_penalty: "",
  seed: "",
  stop: "",
  reasoning_effort: "",
  tools: "",
  tool_choice: "",
};

export const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "min_tokens",
  "presence_penalty",
  "frequency_penalty",
  "repetition_penalty",
  "seed",
] as const;

/** The names of the tools; throws what is wrong with the text. */
export function toolsIn(text: string): { tools: unknown[]; names: string[] } {
  if (!text.trim()) return { tools: [], names: [] };
  let tools: unknown;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools are no JSON: ${(error as Error).message}`);
  }
  if (!Array.isArray(tools)) throw new Error("Tools must be a JSON list.");
  const names = tools.map((tool: { function?: { name?: unknown } } | null) => tool?.function?.name);
  if (!names.every((name) => typeof name === "string")) {
    throw new Error('Each tool must be {"type": "function", "function": {"name": ...}}.');
  }
  return { tools, names: names as string[] };
}

/** What is sent. A field that was left empty is absent, so that the model's own default counts. */
export function bodyOf(model: string, turns: Turn[], settings: Settings): Record<string, unknown> {
  const body: Record<string, unknown> = {
    model,
    messages: messagesOf(turns, settings.system),
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) {
    const text = settings[name].trim();
    if (!text) continue;
    const value = Number(text);
    if (!Number.isFinite(value)) throw new Error(`${name} must be a number, not ${text}.`);
    body[name] = value;
  }
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  const { tools, names } = toolsIn(settings.tools);
  if (tools.length) {
    body.tools = tools;
    const choice = settings.tool_choice;
    if (choice.startsWith("=") && names.includes(choice.slice(1))) {
      body.tool_choice = { type: "function", function: { name: choice.slice(1) } };
    } else if (choice && !choice.startsWith("=")) {
      body.tool_choice = choice;
    }
  }
  return body;
}

/** A turn that failed without a word is left out, and so is the question before it. */
function messagesOf(turns: Turn[], system: string): Record<string, unknown>[] {
  const messages: Record<string, unknown>[] = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role === "user") messages.push({ role: "user", content: turn.text });
    else if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.callId, content: turn.text });
    else if (turn.text || turn.calls.length) messages.push(assistantMessage(turn));
    else if (turn.state !== "streaming" && messages.at(-1)?.role === "user") messages.pop();
  }
  return messages;
}

function assistantMessage(turn: AssistantTurn): Record<string, unknown> {
  const message: Record<string, unknown> = { role: "assistant", content: turn.text || null };
  const whole = turn.calls.filter((call) => isObject(call));
  if (whole.length) {
    message.tool_calls = whole.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  } else if (message.content === null) {
    message.content = "";
  }
  return message;
}

/** False for a call that was cut before its end. */
export function isObject(call: Call): boolean {
  try {
    const value: unknown = JSON.parse(call.arguments || "{}");
    return typeof value === "object" && value !== null;
  } catch {
    return false;
  }
}
