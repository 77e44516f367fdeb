// The page at /: asks for a key where one is needed, then shows the chat, and to admins the state of the service.

import { render } from "preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Chat } from "./chat";
import { KeyForm } from "./key";
import { Overview } from "./overview";
import { type Health, type Load, type Model, Refused, Service, said } from "./service";

const STATUS_MS = 5000;

type View = "chat" | "overview";

interface Access {
  models: Model[];
  isAdmin: boolean;
}

/** An admin is shown the adapters of all tenants, but may use only those of everybody and of the tenant `default`. */
function usable({ models, isAdmin }: Access): Model[] {
  const isOthers = (one: Model) => one.parent !== null && !["tandem", "default"].includes(one.owned_by);
  return isAdmin ? models.filter((one) => !isOthers(one)) : models;
}

function App() {
  const service = useMemo(() => new Service(), []);
  const [access, setAccess] = useState<Access | null>(null);
  const [asksKey, setAsksKey] = useState(false);
  const [problem, setProblem] = useState<string | null>(null);
  const [view, setView] = useState<View>("chat");
  const [hasSeenOverview, setHasSeenOverview] = useState(false);
  const [hasDocs, setHasDocs] = useState(false);
  const status = useStatus(service);

  const connect = useCallback(
    async (key: string) => {
      service.key = key;
      try {
        const models = await service.models();
        const isAdmin = await service.groups().then(
          () => true,
          () => false,
        );
        setAccess({ models, isAdmin });
        setProblem(null);
        setAsksKey(false);
        if (!isAdmin) setView("chat");
        return null;
      } catch (error) {
        service.key = "";
        setAccess(null);
        const needsKey = error instanceof Refused && error.status === 401;
        setAsksKey(needsKey);
        setProblem(needsKey ? null : said(error));
        return said(error);
      }
    },
    [service],
  );

  useEffect(() => {
    void connect("");
    void service.has("openapi.json").then(setHasDocs);
  }, [connect, service]);

  const show = (wanted: View) => {
    setView(wanted);
    setHasSeenOverview((seen) => seen || wanted === "overview");
  };
  const forget = () => {
    setAccess(null);
    setAsksKey(true);
    service.key = "";
  };

  return (
    <>
      <a class="skip" href="#main">
        Skip to the content
      </a>
      <header class="bar">
        <span class="brand">
          <Mark />
          Tandem
        </span>
        <nav aria-label="Pages">
          <Tab name="chat" label="Chat" view={view} onView={show} />
          {access?.isAdmin && <Tab name="overview" label="Service" view={view} onView={show} />}
          {hasDocs && <a href="docs">API</a>}
        </nav>
        <Status {...status} />
        {access && service.key && (
          <button type="button" class="quiet" onClick={forget}>
            Forget key
          </button>
        )}
        {access && !service.key && (
          <button type="button" class="quiet" onClick={() => setAsksKey(!asksKey)} aria-expanded={asksKey}>
            Use a key
          </button>
        )}
      </header>
      <main id="main" tabIndex={-1}>
        {asksKey && <KeyForm isNeeded={!access} onKey={connect} />}
        {problem && (
          <div class="notice error" role="alert">
            <p>{problem}</p>
            <button type="button" onClick={() => connect(service.key)}>
              Try again
            </button>
          </div>
        )}
        {access && (
          <div hidden={view !== "chat"} class="view">
            <Chat key={service.key} service={service} models={usable(access)} health={status.health} />
          </div>
        )}
        {access?.isAdmin && hasSeenOverview && (
          <div hidden={view !== "overview"} class="view">
            <Overview key={service.key} service={service} health={status.health} isShown={view === "overview"} />
          </div>
        )}
        {!access && !asksKey && !problem && <p class="waiting">Asking the service …</p>}
      </main>
    </>
  );
}

function Tab({ name, label, view, onView }: { name: View; label: string; view: View; onView: (view: View) => void }) {
  return (
    <button type="button" class="tab" aria-current={view === name ? "page" : undefined} onClick={() => onView(name)}>
      {label}
    </button>
  );
}

function Mark() {
  return (
    <svg viewBox="0 0 32 32" width="24" height="24" aria-hidden="true">
      <rect width="32" height="32" rx="8" fill="#0f766e" />
      <path d="M8 11.5h16M16 11.5V24" stroke="#fff" stroke-width="3.2" stroke-linecap="round" fill="none" />
      <circle cx="10" cy="21.5" r="2.6" fill="#99f6e4" />
      <circle cx="22" cy="21.5" r="2.6" fill="#99f6e4" />
    </svg>
  );
}

interface StatusNow {
  health: Health | null;
  load: Load | null;
}

const WORDS: Record<Health, string> = {
  ready: "Ready",
  asleep: "Asleep",
  starting: "Not ready",
  unreachable: "No answer",
};

function Status({ health, load }: StatusNow) {
  if (health === null) return <span class="status" />;
  const groups = health === "ready" && load?.groups_serving !== undefined ? load.groups_serving : null;
  return (
    <span class={`status ${health}`} role="status">
      <span class="dot" aria-hidden="true" />
      {WORDS[health]}
      {groups !== null && (
        <span class="more">
          {" "}
          · {groups} {groups === 1 ? "group" : "groups"}
        </span>
      )}
    </span>
  );
}

function useStatus(service: Service): StatusNow {
  const [now, setNow] = useState<StatusNow>({ health: null, load: null });
  const last = useRef("");
  useEffect(() => {
    const look = async () => {
      if (document.hidden) return;
      const health = await service.health();
      const load = health === "unreachable" ? null : await service.load().catch(() => null);
      const text = JSON.stringify([health, load?.groups_serving]);
      if (text !== last.current) setNow({ health, load });
      last.current = text;
    };
    void look();
    const timer = setInterval(look, STATUS_MS);
    document.addEventListener("visibilitychange", look);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }, [service]);
  return now;
}

render(<App />, document.getElementById("app")!);
