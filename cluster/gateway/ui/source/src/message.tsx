// One turn of the conversation.

import { useId, useState } from "preact/hooks";
import { type AssistantTurn, type ToolTurn, type UserTurn, isObject } from "./conversation";
import { Code, CopyButton, Markdown } from "./markdown";
import type { Call } from "./stream";

export function UserMessage({ turn }: { turn: UserTurn }) {
  return (
    <article class="message user" aria-label="You">
      <div class="bubble">{turn.text}</div>
    </article>
  );
}

export function ToolMessage({ turn }: { turn: ToolTurn }) {
  return (
    <article class="message tool" aria-label={`Result of ${turn.name}`}>
      <p class="who">Result of {turn.name}</p>
      <pre class="result">{turn.text || "(empty)"}</pre>
    </article>
  );
}

interface Props {
  turn: AssistantTurn;
  isAsleep: boolean;
  onAgain: (() => void) | null;
  onResults: ((texts: string[]) => void) | null;
}

export function AssistantMessage({ turn, isAsleep, onAgain, onResults }: Props) {
  const isWaiting = turn.state === "streaming" && turn.firstMs === null;
  return (
    <article class={`message assistant ${turn.state}`} aria-label={`Answer of ${turn.model}`}>
      <p class="who">{turn.model}</p>
      {isWaiting && (
        <p class="waiting">
          <span class="dots" aria-hidden="true">
            <i />
            <i />
            <i />
          </span>
          {isAsleep ? "Waking the service: the model is loaded first …" : "Waiting for the first token …"}
        </p>
      )}
      {turn.thinking && <Thinking turn={turn} />}
      {turn.text && <Markdown text={turn.text} />}
      {turn.calls.length > 0 && <Calls calls={turn.calls} isDone={turn.state !== "streaming"} onResults={onResults} />}
      {turn.error && (
        <p class="notice error" role="alert">
          {turn.error}
        </p>
      )}
      {turn.state !== "streaming" && (
        <footer>
          <span class="facts">{facts(turn).join(" · ")}</span>
          {turn.text && <CopyButton text={turn.text} what="answer" />}
          {turn.requestId && <CopyButton text={turn.requestId} what="request id" label="Copy id" />}
          {onAgain && (
            <button type="button" class="quiet" onClick={onAgain}>
              {turn.state === "failed" ? "Try again" : "Answer again"}
            </button>
          )}
        </footer>
      )}
    </article>
  );
}

function Thinking({ turn }: { turn: AssistantTurn }) {
  const isThinking = turn.state === "streaming" && !turn.text && !turn.calls.length;
  return (
    <details class="thinking" open={isThinking}>
      <summary>{isThinking ? "Thinking …" : "Thinking"}</summary>
      <div class="plain">{turn.thinking}</div>
    </details>
  );
}

const FINISHES: Record<string, string> = {
  length: "cut at its most tokens",
  tool_calls: "calls tools",
  content_filter: "filtered",
};

function facts(turn: AssistantTurn): string[] {
  const found: string[] = [];
  if (turn.state === "stopped") found.push("stopped");
  if (turn.finish && FINISHES[turn.finish]) found.push(FINISHES[turn.finish]!);
  const { usage, firstMs, lastMs } = turn;
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    found.push(
      `${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} out`,
    );
  }
  if (firstMs !== null) found.push(`first token after ${Math.round(firstMs)} ms`);
  if (usage && firstMs !== null && lastMs !== null && lastMs > firstMs && usage.completion_tokens > 1) {
    found.push(`${Math.round((1000 * (usage.completion_tokens - 1)) / (lastMs - firstMs))} tokens/s`);
  }
  return found;
}

function Calls({ calls, isDone, onResults }: { calls: Call[]; isDone: boolean; onResults: Props["onResults"] }) {
  const id = useId();
  const [texts, setTexts] = useState<string[]>([]);
  const whole = calls.filter(isObject);
  const submit = (event: Event) => {
    event.preventDefault();
    onResults?.(texts);
  };
  return (
    <form class="calls" onSubmit={submit}>
      {calls.map((call, at) => {
        const place = whole.indexOf(call);
        return (
          <div class="call" key={at} role="group" aria-label={`Call of ${call.name}`}>
            <p class="call-name">
              <span class="chip">tool call</span> <code>{call.name}</code>
              {isDone && place < 0 && <span class="wrong"> was cut</span>}
            </p>
            <Code text={pretty(call.arguments)} language="json" />
            {onResults && place >= 0 && (
              <>
                <label for={`${id}-${at}`}>What {call.name} returns</label>
                <textarea
                  id={`${id}-${at}`}
                  rows={2}
                  value={texts[place] ?? ""}
                  onInput={(event) => setTexts(Object.assign([...texts], { [place]: event.currentTarget.value }))}
                />
              </>
            )}
          </div>
        );
      })}
      {onResults && (
        <button type="submit" class="primary">
          Send {whole.length > 1 ? "results" : "result"}
        </button>
      )}
    </form>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text || "{}"), null, 2);
  } catch {
    return text; // not all of it is there yet
  }
}
