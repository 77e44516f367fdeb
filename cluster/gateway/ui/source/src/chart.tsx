// A small line chart over time. Its text alternative is its label and the legend, which has the values of now.

export interface Line {
  label: string;
  values: (number | null)[];
}

interface Props {
  title: string;
  lines: Line[];
  /** Times of the values, in milliseconds. */
  times: number[];
  spanMs: number;
  format: (value: number | null) => string;
  /** The least top of the axis. */
  top?: number;
}

const WIDTH = 1000;
const HEIGHT = 100;
const SHARES = [0, 0.5, 1];

export function Chart({ title, lines, times, spanMs, format, top = 1 }: Props) {
  const end = times.at(-1) ?? 0;
  const highest = niceTop(Math.max(top, ...lines.flatMap((line) => line.values.map((value) => value ?? 0))));
  const x = (time: number) => WIDTH * (1 - (end - time) / spanMs);
  const y = (value: number) => HEIGHT * (1 - value / highest);
  const now = lines.map((line) => `${line.label} ${format(line.values.at(-1) ?? null)}`);
  return (
    <figure class="chart card">
      <figcaption>{title}</figcaption>
      <div class="plot" role="img" aria-label={`${title}, now: ${now.join(", ")}`}>
        <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
          {SHARES.map((share) => (
            <line key={share} class="grid" x1="0" x2={WIDTH} y1={y(share * highest)} y2={y(share * highest)} />
          ))}
          {lines.map((line, at) => (
            <path key={line.label} class={`line line-${at % 6}`} d={pathOf(line.values, times, x, y)} />
          ))}
        </svg>
        <span class="axis highest">{format(highest)}</span>
        <span class="axis start">{spanMs < 90_000 ? "1 min" : `${Math.round(spanMs / 60_000)} min`} ago</span>
        <span class="axis end">now</span>
      </div>
      <ul class="legend">
        {lines.map((line, at) => (
          <li key={line.label}>
            <span class={`key-line key-${at % 6}`} aria-hidden="true" />
            {line.label} <b>{format(line.values.at(-1) ?? null)}</b>
          </li>
        ))}
      </ul>
    </figure>
  );
}

/** The curve; it has a gap where there is no value. */
function pathOf(
  values: (number | null)[],
  times: number[],
  x: (time: number) => number,
  y: (value: number) => number,
): string {
  let path = "";
  let isOpen = false;
  values.forEach((value, at) => {
    if (value === null) {
      isOpen = false;
      return;
    }
    path += `${isOpen ? "L" : "M"}${x(times[at]!).toFixed(1)} ${y(value).toFixed(1)}`;
    isOpen = true;
  });
  return path;
}

/** A round number that is not less. */
function niceTop(value: number): number {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((step) => step * power).find((step) => step >= value * 0.999)!;
}
