// A table whose rows become cards on narrow screens: roles are said aloud, as such a layout takes a table's own away.

import type { ComponentChildren } from "preact";

/** A thousand rows every two seconds would keep a browser busy. */
export const MOST_ROWS = 100;

interface Props {
  title: string;
  columns: string[];
  rows: { key: string; cells: ComponentChildren[] }[];
  empty: string;
  /** The number of rows that there are, where these are the first of more. */
  all?: number;
}

export function Table({ title, columns, rows, empty, all = 0 }: Props) {
  if (!rows.length) return <p class="empty">{empty}</p>;
  return (
    <>
      <TableRows title={title} columns={columns} rows={rows} />
      {all > rows.length && <p class="empty">{`and ${all - rows.length} more, which /metrics has`}</p>}
    </>
  );
}

function TableRows({ title, columns, rows }: Pick<Props, "title" | "columns" | "rows">) {
  return (
    <table class="cards" role="table" aria-label={title}>
      <thead role="rowgroup">
        <tr role="row">
          {columns.map((column) => (
            <th key={column} scope="col" role="columnheader">
              {column}
            </th>
          ))}
        </tr>
      </thead>
      <tbody role="rowgroup">
        {rows.map((row) => (
          <tr key={row.key} role="row">
            {row.cells.map((cell, at) =>
              at === 0 ? (
                <th key={at} scope="row" role="rowheader">
                  {cell}
                </th>
              ) : (
                <td key={at} role="cell" data-label={columns[at]}>
                  {cell}
                </td>
              ),
            )}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** A share as a bar, with its words beside it. */
export function Bar({ share, words }: { share: number; words: string }) {
  return (
    <span class="bar-cell">
      <span class="track" aria-hidden="true">
        <span class="fill" style={{ width: `${Math.min(100, Math.max(0, 100 * share))}%` }} />
      </span>
      {words}
    </span>
  );
}
