// Markdown of answers, which may hold anything: a lexer makes tokens of it, and these become elements of a few kinds
// whose texts are text nodes. HTML in an answer is shown as it was written, pictures are not loaded.

import { type Token, type Tokens, lexer } from "marked";
import { Fragment, type ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";

const MOST_DEPTH = 24;
const MOST_CHARS = 200_000;

export function Markdown({ text }: { text: string }) {
  const content = useMemo(() => {
    try {
      if (text.length <= MOST_CHARS) return blocks(lexer(text, { gfm: true }), 0);
    } catch {
      // nested so deep that the lexer gives up
    }
    return <p class="plain">{text}</p>;
  }, [text]);
  return <div class="markdown">{content}</div>;
}

function blocks(tokens: Token[], depth: number): ComponentChildren {
  return tokens.map((token, at) => <Fragment key={at}>{block(token, depth)}</Fragment>);
}

function block(token: Token, depth: number): ComponentChildren {
  if (depth > MOST_DEPTH) return token.raw;
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading": {
      const Level = `h${Math.min(6, (token as Tokens.Heading).depth + 2)}` as "h3";
      return <Level>{inline(token, depth)}</Level>;
    }
    case "paragraph":
      return <p>{inline(token, depth)}</p>;
    case "text":
      return (token as Tokens.Text).tokens ? inline(token, depth) : (token as Tokens.Text).text;
    case "code":
      return <Code text={(token as Tokens.Code).text} language={(token as Tokens.Code).lang ?? ""} />;
    case "blockquote":
      return <blockquote>{blocks((token as Tokens.Blockquote).tokens, depth + 1)}</blockquote>;
    case "list":
      return list(token as Tokens.List, depth);
    case "table":
      return table(token as Tokens.Table, depth);
    case "hr":
      return <hr />;
    default:
      return <p class="plain">{token.raw}</p>;
  }
}

function list(token: Tokens.List, depth: number) {
  const items = token.items.map((item, at) => (
    <li key={at}>
      {item.task && (item.checked ? "☑ " : "☐ ")}
      {blocks(item.tokens, depth + 1)}
    </li>
  ));
  return token.ordered ? <ol start={Number(token.start) || 1}>{items}</ol> : <ul>{items}</ul>;
}

function table(token: Tokens.Table, depth: number) {
  return (
    <div class="scroll" role="region" aria-label="Table" tabIndex={0}>
      <table>
        <thead>
          <tr>
            {token.header.map((cell, at) => (
              <th key={at} scope="col">
                {inlines(cell.tokens, depth + 1)}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {token.rows.map((row, at) => (
            <tr key={at}>
              {row.map((cell, column) => (
                <td key={column}>{inlines(cell.tokens, depth + 1)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function inline(token: Token, depth: number): ComponentChildren {
  return inlines((token as Tokens.Paragraph).tokens ?? [], depth + 1);
}

function inlines(tokens: Token[], depth: number): ComponentChildren {
  return tokens.map((token, at) => <Fragment key={at}>{span(token, depth)}</Fragment>);
}

function span(token: Token, depth: number): ComponentChildren {
  if (depth > MOST_DEPTH) return token.raw;
  switch (token.type) {
    case "strong":
      return <strong>{inline(token, depth)}</strong>;
    case "em":
      return <em>{inline(token, depth)}</em>;
    case "del":
      return <del>{inline(token, depth)}</del>;
    case "codespan":
      return <code>{(token as Tokens.Codespan).text}</code>;
    case "br":
      return <br />;
    case "escape":
      return (token as Tokens.Escape).text;
    case "link":
      return link(token as Tokens.Link, depth);
    case "text":
      return (token as Tokens.Text).tokens ? inline(token, depth) : (token as Tokens.Text).text;
    default:
      return token.raw; // HTML and pictures among them
  }
}

function link(token: Tokens.Link, depth: number) {
  if (!isWeb(token.href)) return token.raw;
  return (
    <a href={token.href} target="_blank" rel="noopener noreferrer nofollow">
      {inline(token, depth)}
    </a>
  );
}

function isWeb(address: string): boolean {
  try {
    return ["http:", "https:", "mailto:"].includes(new URL(address).protocol);
  } catch {
    return false;
  }
}

export function Code({ text, language }: { text: string; language: string }) {
  const name = language.split(/\s/)[0] ?? "";
  return (
    <div class="code">
      <div class="code-head">
        <span>{name || "text"}</span>
        <CopyButton text={text} what="code" />
      </div>
      <pre tabIndex={0} aria-label={`Code${name ? `, ${name}` : ""}`}>
        <code>{text}</code>
      </pre>
    </div>
  );
}

export function CopyButton({ text, what, label = "Copy" }: { text: string; what: string; label?: string }) {
  const [state, setState] = useState<"" | "Copied" | "Not allowed">("");
  useEffect(() => {
    if (!state) return;
    const timer = setTimeout(() => setState(""), 1500);
    return () => clearTimeout(timer);
  }, [state]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setState("Copied");
    } catch {
      setState("Not allowed"); // without TLS browsers give no clipboard
    }
  };
  return (
    <button type="button" class="quiet" aria-label={`Copy ${what}`} onClick={copy}>
      <span aria-live="polite">{state || label}</span>
    </button>
  );
}
