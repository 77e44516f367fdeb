// Prometheus' text as /metrics has it, and what charts show of it: values now, rates and quantiles between two readings.

export interface Sample {
  labels: Record<string, string>;
  value: number;
}

/** Samples by name, without the prefix before the colon, whichever --metrics-prefix says. */
export type Families = Map<string, Sample[]>;

export interface Reading {
  atMs: number;
  families: Families;
}

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export function parse(text: string): Families {
  const families: Families = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found) continue;
    const name = found[1]!.slice(found[1]!.lastIndexOf(":") + 1);
    const labels: Record<string, string> = {};
    for (const [, label, value] of (found[2] ?? "").matchAll(LABEL)) labels[label!] = unescaped(value!);
    const samples = families.get(name);
    const sample = { labels, value: Number(found[3]) };
    if (samples) samples.push(sample);
    else families.set(name, [sample]);
  }
  return families;
}

function unescaped(value: string): string {
  return value.replace(/\\(.)/g, (_, char: string) => (char === "n" ? "\n" : char));
}

export function samples(families: Families, name: string, labels: Record<string, string> = {}): Sample[] {
  const wanted = Object.entries(labels);
  return (families.get(name) ?? []).filter((one) => wanted.every(([label, value]) => one.labels[label] === value));
}

/** Sum over all labels that are not given; null where there is no such sample. */
export function sum(families: Families, name: string, labels: Record<string, string> = {}): number | null {
  const found = samples(families, name, labels);
  return found.length ? found.reduce((total, one) => total + one.value, 0) : null;
}

/** Growth of a counter in a second; 0 where it began anew. */
export function rate(before: Reading, now: Reading, name: string, labels: Record<string, string> = {}): number | null {
  const grown = (sum(now.families, name, labels) ?? NaN) - (sum(before.families, name, labels) ?? NaN);
  const seconds = (now.atMs - before.atMs) / 1000;
  return Number.isNaN(grown) || seconds <= 0 ? null : Math.max(0, grown / seconds);
}

/** A quantile of what a histogram has counted between two readings, as Prometheus computes it; null without any. */
export function quantile(before: Reading, now: Reading, name: string, share: number): number | null {
  const older = buckets(before.families, name);
  const counts = [...buckets(now.families, name)].map(([bound, count]): [number, number] => [
    bound,
    Math.max(0, count - (older.get(bound) ?? 0)),
  ]);
  counts.sort((a, b) => a[0] - b[0]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (!total) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= share * total) {
      if (!Number.isFinite(bound)) return low;
      return count === below ? bound : low + ((bound - low) * (share * total - below)) / (count - below);
    }
    [low, below] = [bound, count];
  }
  return null;
}

function buckets(families: Families, name: string): Map<number, number> {
  const found = new Map<number, number>();
  for (const one of families.get(`${name}_bucket`) ?? []) {
    const bound = one.labels.le === "+Inf" ? Infinity : Number(one.labels.le);
    found.set(bound, (found.get(bound) ?? 0) + one.value);
  }
  return found;
}

// ---- numbers for people ----

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export function shortNumber(value: number | null): string {
  return value === null ? "–" : COMPACT.format(value);
}

export function percent(share: number | null): string {
  if (share === null) return "–";
  const value = 100 * share;
  return `${value > 0 && value < 1 ? "< 1" : Math.round(value)} %`;
}

export function bytes(value: number | null): string {
  if (value === null) return "–";
  const steps = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (value >= 1024 && step < steps.length - 1) [value, step] = [value / 1024, step + 1];
  return `${value >= 10 || step === 0 ? Math.round(value) : value.toFixed(1)} ${steps[step]}`;
}

export function seconds(value: number | null): string {
  if (value === null) return "–";
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
}
