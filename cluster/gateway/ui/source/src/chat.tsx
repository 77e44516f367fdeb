// The chat: turns, the answer that is being written, and what one types below.

import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { type AssistantTurn, NO_SETTINGS, type Settings, type Turn, bodyOf, isObject } from "./conversation";
import { AssistantMessage, ToolMessage, UserMessage } from "./message";
import type { Health, Model, Service } from "./service";
import { said } from "./service";
import { SettingsPanel } from "./settings";
import { emptyAnswer, eventsOf, take } from "./stream";

const EXAMPLES = ["What is 2 + 3?", "Tell me a short story about a whale.", "Count from 1 to 9."];

interface Props {
  service: Service;
  models: Model[];
  health: Health | null;
}

export function Chat({ service, models, health }: Props) {
  const [model, setModel] = useState(models[0]?.id ?? "");
  const [settings, setSettings] = useState<Settings>(NO_SETTINGS);
  const [showsSettings, setShowsSettings] = useState(false);
  const [turns, setTurns] = useState<Turn[]>([]);
  const [draft, setDraft] = useState("");
  const [problem, setProblem] = useState<string | null>(null);
  const running = useRef<AbortController | null>(null);
  const input = useRef<HTMLTextAreaElement>(null);
  const last = turns.at(-1);
  const isBusy = last?.role === "assistant" && last.state === "streaming";

  const answer = useCallback(
    async (asked: Turn[]) => {
      let body: Record<string, unknown>;
      try {
        body = bodyOf(model, asked, settings);
      } catch (error) {
        setProblem(said(error));
        return false;
      }
      setProblem(null);
      const control = (running.current = new AbortController());
      const begun = { role: "assistant", model, state: "streaming", error: null, requestId: "" } as const;
      const turn: AssistantTurn = { ...begun, ...emptyAnswer() };
      const show = () => setTurns([...asked, { ...turn, calls: turn.calls.map((call) => ({ ...call })) }]);
      show();
      let frame = 0;
      const showSoon = () => {
        frame ||= requestAnimationFrame(() => {
          frame = 0;
          show();
        });
      };
      const startMs = performance.now();
      try {
        const stream = await service.chat(body, control.signal, (id) => (turn.requestId = id));
        for await (const data of eventsOf(stream)) {
          take(turn, data, performance.now() - startMs);
          showSoon();
        }
        turn.state = "done";
      } catch (error) {
        turn.state = control.signal.aborted ? "stopped" : "failed";
        turn.error = control.signal.aborted ? null : said(error);
      }
      cancelAnimationFrame(frame);
      if (running.current === control) {
        running.current = null;
        show();
      }
      return true;
    },
    [model, settings, service],
  );

  const send = async (text: string) => {
    if (!text.trim() || isBusy) return;
    const asked = answer([...turns, { role: "user", text }]);
    setDraft("");
    if (!(await asked)) setDraft(text);
  };
  const stop = () => {
    running.current?.abort();
    input.current?.focus(); // the button goes
  };
  const again = () => answer(turns.slice(0, -1));
  const clear = () => {
    running.current?.abort();
    running.current = null;
    setTurns([]);
    setProblem(null);
    input.current?.focus();
  };
  const results = (texts: string[]) => {
    if (last?.role !== "assistant") return;
    const calls = last.calls.filter(isObject);
    const tools = calls.map((call, at): Turn => ({
      role: "tool",
      callId: call.id,
      name: call.name,
      text: texts[at] ?? "",
    }));
    void answer([...turns, ...tools]);
  };

  useEffect(() => () => running.current?.abort(), []);
  const log = useFollowing(turns);

  return (
    <div class={`chat ${showsSettings ? "with-settings" : ""}`}>
      <h1 class="visually-hidden">Chat</h1>
      <section class="conversation" aria-label="Conversation">
        <div class="toolbar">
          <label class="visually-hidden" for="model">
            Model
          </label>
          <ModelChoice models={models} model={model} onModel={setModel} />
          <span class="grow" />
          <button type="button" class="quiet" onClick={clear} disabled={!turns.length}>
            New chat
          </button>
          <button
            type="button"
            class="quiet"
            aria-expanded={showsSettings}
            aria-controls="settings"
            onClick={() => setShowsSettings(!showsSettings)}
          >
            Settings
          </button>
        </div>
        <div class="log" ref={log} tabIndex={0} role="log" aria-label="Messages" aria-busy={isBusy}>
          {turns.length === 0 && <Welcome model={model} health={health} onSend={send} />}
          {turns.map((turn, at) => {
            const isLast = at === turns.length - 1;
            if (turn.role === "user") return <UserMessage key={at} turn={turn} />;
            if (turn.role === "tool") return <ToolMessage key={at} turn={turn} />;
            return (
              <AssistantMessage
                key={at}
                turn={turn}
                isAsleep={health === "asleep"}
                onAgain={isLast && !isBusy ? again : null}
                onResults={isLast && !isBusy && turn.calls.some(isObject) ? results : null}
              />
            );
          })}
        </div>
        {problem && (
          <p class="notice error" role="alert">
            {problem}
          </p>
        )}
        <Composer
          draft={draft}
          onDraft={setDraft}
          isBusy={isBusy}
          onSend={send}
          onStop={stop}
          input={input}
          model={model}
        />
      </section>
      <SettingsPanel
        settings={settings}
        onSettings={setSettings}
        isShown={showsSettings}
        onClose={() => setShowsSettings(false)}
      />
    </div>
  );
}

function ModelChoice({ models, model, onModel }: { models: Model[]; model: string; onModel: (id: string) => void }) {
  const bases = models.filter((one) => one.parent === null);
  const adapters = models.filter((one) => one.parent !== null);
  const options = (some: Model[]) =>
    some.map((one) => (
      <option key={one.id} value={one.id}>
        {one.id}
      </option>
    ));
  return (
    <select id="model" value={model} onChange={(event) => onModel(event.currentTarget.value)}>
      {adapters.length ? <optgroup label="Models">{options(bases)}</optgroup> : options(bases)}
      {adapters.length > 0 && <optgroup label="LoRA adapters">{options(adapters)}</optgroup>}
    </select>
  );
}

function Welcome({ model, health, onSend }: { model: string; health: Health | null; onSend: (text: string) => void }) {
  return (
    <div class="welcome">
      <h2>Chat with {model}</h2>
      <p>It runs on this service. Nothing of the conversation is kept: it ends with this tab.</p>
      {health === "asleep" && (
        <p class="notice">
          The service is asleep: no group runs, as nobody has asked for a while. The first message wakes it, and is
          answered as soon as the model is loaded.
        </p>
      )}
      {health === "starting" && (
        <p class="notice">No group of workers is ready yet. Messages may be refused until one is.</p>
      )}
      <div class="examples" role="group" aria-label="Examples">
        {EXAMPLES.map((text) => (
          <button type="button" key={text} onClick={() => onSend(text)}>
            {text}
          </button>
        ))}
      </div>
    </div>
  );
}

interface ComposerProps {
  draft: string;
  onDraft: (text: string) => void;
  isBusy: boolean;
  onSend: (text: string) => void;
  onStop: () => void;
  input: { current: HTMLTextAreaElement | null };
  model: string;
}

function Composer({ draft, onDraft, isBusy, onSend, onStop, input, model }: ComposerProps) {
  useEffect(() => input.current?.focus(), [input]);
  useLayoutEffect(() => {
    const area = input.current;
    if (!area) return;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, 240)}px`;
  }, [draft, input]);
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Escape" && isBusy) onStop();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    onSend(draft);
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        onSend(draft);
      }}
    >
      <label class="visually-hidden" for="message">
        Message
      </label>
      <textarea
        id="message"
        ref={input}
        rows={1}
        value={draft}
        placeholder={`Message ${model}`}
        aria-describedby="message-keys"
        onInput={(event) => onDraft(event.currentTarget.value)}
        onKeyDown={onKeyDown}
      />
      {isBusy ? (
        <button key="stop" type="button" class="primary stop" onClick={onStop}>
          <span class="square" aria-hidden="true" />
          Stop
        </button>
      ) : (
        <button key="send" type="submit" class="primary" disabled={!draft.trim()}>
          Send
        </button>
      )}
      <p id="message-keys" class="hint">
        Enter sends, Shift+Enter starts a line, Esc stops an answer.
      </p>
    </form>
  );
}

/** Keeps the end of the log in sight while it grows, unless its reader has scrolled up. */
function useFollowing(turns: Turn[]) {
  const log = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const count = useRef(0);
  useEffect(() => {
    const box = log.current;
    if (!box) return;
    const look = () => {
      follows.current = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
    };
    box.addEventListener("scroll", look, { passive: true });
    return () => box.removeEventListener("scroll", look);
  }, []);
  useLayoutEffect(() => {
    const isNew = turns.length !== count.current;
    count.current = turns.length;
    if (log.current && (follows.current || isNew)) log.current.scrollTop = log.current.scrollHeight;
  }, [turns]);
  return log;
}
