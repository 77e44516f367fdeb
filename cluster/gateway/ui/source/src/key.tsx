// Asks for a key. It goes to the Service object and nowhere else.

import { useEffect, useRef, useState } from "preact/hooks";

interface Props {
  isNeeded: boolean;
  /** Returns why the key does not do. */
  onKey: (key: string) => Promise<string | null>;
}

export function KeyForm({ isNeeded, onKey }: Props) {
  const [wrong, setWrong] = useState<string | null>(null);
  const [isBusy, setBusy] = useState(false);
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => input.current?.focus(), []);
  const submit = async (event: Event) => {
    event.preventDefault();
    const key = input.current!.value.trim();
    if (!key || isBusy) return;
    setBusy(true);
    setWrong(await onKey(key));
    setBusy(false);
    input.current?.focus();
  };
  return (
    <form class="key card" onSubmit={submit}>
      <h1>{isNeeded ? "This service asks for a key" : "Use a key"}</h1>
      <p id="key-about">
        An API key opens the chat, an admin key the state of the service too. The key stays in the memory of this tab:
        reload the page, and it is gone.
      </p>
      <label for="key">Key</label>
      <div class="row">
        <input
          id="key"
          ref={input}
          type="password"
          autocomplete="off"
          spellcheck={false}
          aria-describedby={wrong ? "key-wrong key-about" : "key-about"}
          aria-invalid={wrong !== null}
        />
        <button type="submit" class="primary" disabled={isBusy}>
          {isBusy ? "Asking …" : "Connect"}
        </button>
      </div>
      {wrong && (
        <p id="key-wrong" class="wrong" role="alert">
          {wrong}
        </p>
      )}
    </form>
  );
}
