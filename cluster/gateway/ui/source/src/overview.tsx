// The state of the service, for admins: what its routes say every two seconds while the page is looked at.

import { useEffect, useRef, useState } from "preact/hooks";
import { Chart } from "./chart";
import {
  type Families,
  type Reading,
  bytes,
  parse,
  percent,
  quantile,
  rate,
  samples,
  seconds,
  shortNumber,
  sum,
} from "./metrics";
import { type Group, type Health, type Load, type Model, type Service, type Tenant, said } from "./service";
import { Bar, MOST_ROWS, Table } from "./table";

const PERIOD_MS = 2000;
const [LEAST_SPAN_MS, SPAN_MS] = [60_000, 5 * 60_000];
const QUANTILE_MS = 30_000;
const LISTS_MS = 10_000;
const CHARTED = [
  "generation_tokens_total",
  "prompt_tokens_total",
  "time_to_first_token_seconds_bucket",
  "kv_cache_usage_perc",
];

/** What charts need of one reading: a reading of a service with a thousand tenants has megabytes. */
interface Moment extends Reading {
  load: Load;
  running: number;
  waiting: number;
}

interface Now {
  families: Families;
  groups: Group[];
  models: Model[];
  tenants: Tenant[];
}

interface Props {
  service: Service;
  health: Health | null;
  isShown: boolean;
}

export function Overview({ service, health, isShown }: Props) {
  const { moments, now, problem } = useReadings(service, isShown);
  const version = useVersion(service);
  const last = moments.at(-1);
  return (
    <div class="overview" tabIndex={0} role="region" aria-label="State of the service">
      <h1>
        Service <small>{version && `Tandem ${version}`}</small>
      </h1>
      {problem && (
        <p class="notice error" role="alert">
          {problem}
        </p>
      )}
      {health === "asleep" && (
        <p class="notice">
          The service is asleep: no group runs, as nobody has asked for a while. The next request wakes it.
        </p>
      )}
      {!last || !now ? (
        !problem && <p class="waiting">Reading the state of the service …</p>
      ) : (
        <>
          <Figures moments={moments} groups={now.groups} />
          {last.load.redis === "away" && (
            <p class="notice">Redis does not answer. Requests go on with what the gateways knew last.</p>
          )}
          {last.load.why && (
            <p class="notice">{`Groups wanted: ${last.load.groups_wanted}. ${sentence(last.load.why)}`}</p>
          )}
          <Charts moments={moments} groups={now.groups} />
          <Groups groups={now.groups} />
          <Tiers groups={now.groups} families={now.families} />
          <Adapters models={now.models} families={now.families} />
          <Tenants tenants={now.tenants} families={now.families} />
        </>
      )}
    </div>
  );
}

function useVersion(service: Service): string {
  const [version, setVersion] = useState("");
  useEffect(() => {
    service.version().then(setVersion, () => undefined);
  }, [service]);
  return version;
}

/** Asks again and again, as long as this is looked at; keeps SPAN_MS of answers. */
function useReadings(service: Service, isShown: boolean) {
  const [now, setNow] = useState<Now | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const moments = useRef<Moment[]>([]);
  useEffect(() => {
    if (!isShown) return;
    let isOver = false;
    let timer = 0;
    let lists: { models: Model[]; tenants: Tenant[] } | null = null;
    let listedMs = -Infinity;
    const look = async () => {
      clearTimeout(timer);
      try {
        if (!document.hidden) {
          const atMs = Date.now();
          if (lists === null || atMs - listedMs >= LISTS_MS) {
            const [models, tenants] = await Promise.all([service.models(), service.tenants()]);
            lists = { models, tenants };
            listedMs = atMs;
          }
          const [text, load, groups] = await Promise.all([service.metrics(), service.load(), service.groups()]);
          if (isOver) return;
          const families = parse(text);
          moments.current = [...moments.current.filter((one) => one.atMs > atMs - SPAN_MS), momentOf(families, load)];
          setNow({ families, groups, ...lists });
          setProblem(null);
        }
      } catch (error) {
        if (!isOver) setProblem(said(error));
      }
      if (!isOver) timer = setTimeout(look, PERIOD_MS) as unknown as number;
    };
    const onVisible = () => {
      if (!document.hidden) void look();
    };
    void look();
    document.addEventListener("visibilitychange", onVisible);
    return () => {
      isOver = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisible);
    };
  }, [service, isShown]);
  return { moments: moments.current, now, problem };
}

function momentOf(families: Families, load: Load): Moment {
  return {
    atMs: Date.now(),
    families: new Map(CHARTED.map((name) => [name, families.get(name) ?? []])),
    load,
    running: sum(families, "num_requests_running") ?? 0,
    waiting: (sum(families, "num_requests_waiting") ?? 0) + (load.requests_held ?? 0),
  };
}

function rates(moments: Moment[], name: string): (number | null)[] {
  return moments.map((one, at) => (at === 0 ? null : rate(moments[at - 1]!, one, name)));
}

function Figures({ moments, groups }: { moments: Moment[]; groups: Group[] }) {
  const { load, families, running, waiting } = moments.at(-1)!;
  const serving = groups.filter((one) => one.state === "serving").length;
  const ranks = groups.reduce((total, one) => total + one.ranks.length, 0);
  const kv = samples(families, "kv_cache_usage_perc").map((one) => one.value);
  const cells: [string, string, string][] = [
    ["Groups", `${serving} of ${groups.length}`, `serving, with ${ranks} ${ranks === 1 ? "rank" : "ranks"}`],
    ["Running", shortNumber(running), "requests that hold a row"],
    [
      "Waiting",
      shortNumber(waiting),
      load.requests_held ? `${load.requests_held} of them for a group` : "requests in queues",
    ],
    ["Tokens/s", shortNumber(rates(moments, "generation_tokens_total").at(-1) ?? null), "generated now"],
    ["KV in use", percent(kv.length ? Math.max(...kv) : null), "in the fullest group"],
  ];
  return (
    <dl class="figures">
      {cells.map(([name, value, about]) => (
        <div class="card" key={name}>
          <dt>{name}</dt>
          <dd>
            <strong>{value}</strong>
            <span>{about}</span>
          </dd>
        </div>
      ))}
    </dl>
  );
}

function Charts({ moments, groups }: { moments: Moment[]; groups: Group[] }) {
  const times = moments.map((one) => one.atMs);
  const seenMs = times.at(-1)! - times[0]!;
  const given = { times, spanMs: Math.min(SPAN_MS, 60_000 * Math.ceil(Math.max(LEAST_SPAN_MS, seenMs) / 60_000)) };
  const firsts = (share: number) =>
    moments.map((one, at) => {
      const before = moments.slice(0, at).findLast((other) => other.atMs <= one.atMs - QUANTILE_MS) ?? moments[0]!;
      return at === 0 ? null : quantile(before, one, "time_to_first_token_seconds", share);
    });
  const kv = groups.slice(0, 6).map((group) => ({
    label: group.id.slice(0, 8),
    values: moments.map((one) => sum(one.families, "kv_cache_usage_perc", { engine: group.id })),
  }));
  return (
    <section class="charts" aria-label="Charts">
      <Chart
        title="Tokens a second"
        lines={[
          { label: "generated", values: rates(moments, "generation_tokens_total") },
          { label: "prompt", values: rates(moments, "prompt_tokens_total") },
        ]}
        format={shortNumber}
        top={10}
        {...given}
      />
      <Chart
        title="Requests"
        lines={[
          { label: "running", values: moments.map((one) => one.running) },
          { label: "waiting", values: moments.map((one) => one.waiting) },
        ]}
        format={shortNumber}
        top={4}
        {...given}
      />
      <Chart
        title="Time to the first token"
        lines={[
          { label: "half within", values: firsts(0.5) },
          { label: "95 % within", values: firsts(0.95) },
        ]}
        format={seconds}
        top={0.1}
        {...given}
      />
      <Chart
        title={`KV cache in use${groups.length > kv.length ? ` (${kv.length} of ${groups.length} groups)` : ""}`}
        lines={kv}
        format={percent}
        top={0.1}
        {...given}
      />
    </section>
  );
}

function Groups({ groups }: { groups: Group[] }) {
  return (
    <section>
      <h2>Groups and their queues</h2>
      <Table
        title="Groups"
        columns={["Group", "State", "Running", "Waiting", "Outstanding tokens", "Ranks", "Node"]}
        rows={groups.map((one) => ({
          key: one.id,
          cells: [
            <code>{one.id}</code>,
            <span class={`chip ${one.stalled_s > 10 ? "bad" : one.state}`}>{stateOf(one)}</span>,
            one.running,
            one.waiting,
            shortNumber(one.outstanding_tokens),
            one.ranks.length ? one.ranks.map((rank) => `${rank.rank}: pid ${rank.pid}`).join(", ") : "–",
            <code>{one.node.slice(0, 12)}</code>,
          ],
        }))}
        empty="No group runs."
      />
    </section>
  );
}

function stateOf(group: Group): string {
  if (group.stalled_s > 10) return `no step for ${Math.round(group.stalled_s)} s`;
  if (group.state !== "loading") return group.state;
  if (group.fetching) return `downloads: ${group.fetching}`;
  return group.total_bytes ? `loading ${percent(group.loaded_bytes / group.total_bytes)}` : "loading";
}

function Tiers({ groups, families }: { groups: Group[]; families: Families }) {
  if (!groups.length) return null;
  return (
    <section>
      <h2>KV cache, by tier</h2>
      <Table
        title="KV cache"
        columns={["Group", "Device", "Host memory", "Disk", "Prompt found in cache", "To the host", "Back"]}
        rows={groups.map((one) => {
          const labels = { engine: one.id };
          const used = sum(families, "kv_cache_usage_perc", labels) ?? one.kv_usage;
          const [blocks, slots] = [sum(families, "kv_host_blocks", labels), sum(families, "kv_host_slots", labels)];
          const asked = sum(families, "prefix_cache_queries_total", labels);
          const found = sum(families, "prefix_cache_hits_total", labels);
          return {
            key: one.id,
            cells: [
              <code>{one.id}</code>,
              <Bar share={used} words={`${percent(used)} of ${shortNumber(one.kv_tokens)} tokens`} />,
              slots ? <Bar share={(blocks ?? 0) / slots} words={`${blocks} of ${slots} blocks`} /> : "off",
              disk(one, families),
              asked ? percent((found ?? 0) / asked) : "–",
              bytes(sum(families, "kv_offload_store_bytes", labels)),
              bytes(sum(families, "kv_offload_load_bytes", labels)),
            ],
          };
        })}
        empty=""
      />
    </section>
  );
}

function disk(group: Group, families: Families): string {
  if (group.disk_disabled) return `switched off: ${group.disk_disabled}`;
  const spilled = sum(families, "kv_offload_spill_bytes", { engine: group.id });
  return spilled ? `${bytes(spilled)} written` : "–";
}

function Adapters({ models, families }: { models: Model[]; families: Families }) {
  const adapters = models.filter((one) => one.parent !== null);
  const used = (label: string) => {
    const names = samples(families, "lora_requests_info").map((one) => one.labels[label] ?? "");
    return new Set(names.flatMap((text) => text.split(",")));
  };
  const [running, waiting] = [used("running_lora_adapters"), used("waiting_lora_adapters")];
  return (
    <section>
      <h2>Adapters</h2>
      <Table
        title="Adapters"
        columns={["Adapter", "Whose", "On devices", "In host memory", "Pinned", "Requests"]}
        rows={adapters.slice(0, MOST_ROWS).map((one) => {
          const held = samples(families, "adapter_residency", { adapter: one.id });
          const at = (tier: string) => held.filter((sample) => sample.labels.tier === tier).length;
          const groups = (count: number) => (count ? `${count} ${count === 1 ? "group" : "groups"}` : "–");
          return {
            key: one.id,
            cells: [
              one.id,
              one.owned_by === "tandem" ? "everybody" : one.owned_by,
              groups(at("device")),
              groups(at("host")),
              held.some((sample) => sample.labels.pinned === "true") ? "yes" : "–",
              running.has(one.id) ? "run" : waiting.has(one.id) ? "wait" : "–",
            ],
          };
        })}
        empty="No adapters are served."
        all={adapters.length}
      />
    </section>
  );
}

function Tenants({ tenants, families }: { tenants: Tenant[]; families: Families }) {
  const counted = samples(families, "tenant_tokens_total").map((one) => one.labels.tenant!);
  const used = (tenant: string) => sum(families, "tenant_tokens_total", { tenant, kind: "completion" }) ?? 0;
  const shares = [...new Set([...tenants.map((one) => one.name), ...counted])].map((name) => ({
    name,
    tokens: used(name),
  }));
  shares.sort((a, b) => b.tokens - a.tokens || a.name.localeCompare(b.name));
  return (
    <section>
      <h2>Tenants since the start</h2>
      <Table
        title="Tenants"
        columns={[
          "Tenant",
          "Requests",
          "Prompt tokens",
          "Of these cached",
          "Generated tokens",
          "Waiting",
          "Mean wait",
          "Refused",
        ]}
        rows={shares.slice(0, MOST_ROWS).map(({ name: tenant }) => {
          const of = (name: string, labels: Record<string, string> = {}) => sum(families, name, { tenant, ...labels });
          const [waited, queued] = [of("tenant_queue_time_seconds_total"), of("tenant_queued_requests_total")];
          return {
            key: tenant,
            cells: [
              tenant,
              shortNumber(of("tenant_requests_total")),
              shortNumber(of("tenant_tokens_total", { kind: "prompt" })),
              shortNumber(of("tenant_tokens_total", { kind: "cached" })),
              shortNumber(of("tenant_tokens_total", { kind: "completion" })),
              shortNumber(of("tenant_num_requests_waiting")),
              queued ? seconds((waited ?? 0) / queued) : "–",
              shortNumber(of("tenant_rejections_total")),
            ],
          };
        })}
        empty="Nobody has used it yet."
        all={shares.length}
      />
    </section>
  );
}

function sentence(text: string): string {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}
