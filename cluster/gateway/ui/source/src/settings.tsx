// Settings of the next answers. A field that is empty is not sent: the model's own default counts.

import { NO_SETTINGS, NUMBERS, type Settings, toolsIn } from "./conversation";
import { said } from "./service";

interface Props {
  settings: Settings;
  onSettings: (settings: Settings) => void;
  isShown: boolean;
  onClose: () => void;
}

type NumberName = (typeof NUMBERS)[number];

const FIELDS: Record<NumberName, { label: string; help: string; min?: number; max?: number; step: number }> = {
  temperature: { label: "Temperature", help: "0: always the likeliest token", min: 0, max: 2, step: 0.1 },
  top_p: { label: "Top-p", help: "likeliest tokens up to this share", min: 0, max: 1, step: 0.05 },
  top_k: { label: "Top-k", help: "so many likeliest tokens", min: -1, step: 1 },
  min_p: { label: "Min-p", help: "tokens above this share of the best", min: 0, max: 1, step: 0.05 },
  max_tokens: { label: "Max tokens", help: "longest answer", min: 1, step: 1 },
  min_tokens: { label: "Min tokens", help: "no end before so many", min: 0, step: 1 },
  presence_penalty: { label: "Presence penalty", help: "against tokens that occurred", min: -2, max: 2, step: 0.1 },
  frequency_penalty: { label: "Frequency penalty", help: "the same, by their count", min: -2, max: 2, step: 0.1 },
  repetition_penalty: { label: "Repetition penalty", help: "1: none", min: 0, max: 2, step: 0.05 },
  seed: { label: "Seed", help: "the same again", step: 1 },
};

const EXAMPLE_TOOLS = JSON.stringify(
  [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Get the weather of a city.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
  null,
  2,
);

export function SettingsPanel({ settings, onSettings, isShown, onClose }: Props) {
  const set = (name: keyof Settings) => (event: Event) =>
    onSettings({ ...settings, [name]: (event.currentTarget as HTMLInputElement).value });
  return (
    <aside
      id="settings"
      aria-label="Settings"
      hidden={!isShown}
      onKeyDown={(event) => event.key === "Escape" && onClose()}
    >
      <div class="settings-head">
        <h2>Settings</h2>
        <button type="button" class="quiet" onClick={() => onSettings(NO_SETTINGS)}>
          Reset
        </button>
        <button type="button" class="quiet" onClick={onClose}>
          Close
        </button>
      </div>
      <label for="set-system">System prompt</label>
      <textarea id="set-system" rows={3} value={settings.system} onInput={set("system")} placeholder="You are …" />
      <fieldset>
        <legend>Sampling</legend>
        <div class="fields">
          {NUMBERS.map((name) => (
            <div class="field" key={name}>
              <label for={`set-${name}`}>{FIELDS[name].label}</label>
              <input
                id={`set-${name}`}
                type="number"
                inputMode="decimal"
                min={FIELDS[name].min}
                max={FIELDS[name].max}
                step={FIELDS[name].step}
                value={settings[name]}
                onInput={set(name)}
                placeholder="default"
                aria-describedby={`about-${name}`}
              />
              <span class="hint" id={`about-${name}`}>
                {FIELDS[name].help}
              </span>
            </div>
          ))}
          <div class="field">
            <label for="set-reasoning">Reasoning effort</label>
            <select id="set-reasoning" value={settings.reasoning_effort} onChange={set("reasoning_effort")}>
              <option value="">default</option>
              <option value="none">none</option>
              <option value="low">low</option>
              <option value="medium">medium</option>
              <option value="high">high</option>
            </select>
          </div>
        </div>
        <label for="set-stop">Stop texts, one a line</label>
        <textarea id="set-stop" rows={2} value={settings.stop} onInput={set("stop")} />
      </fieldset>
      <ToolFields settings={settings} onSettings={onSettings} set={set} />
    </aside>
  );
}

interface ToolProps {
  settings: Settings;
  onSettings: (settings: Settings) => void;
  set: (name: keyof Settings) => (event: Event) => void;
}

function ToolFields({ settings, onSettings, set }: ToolProps) {
  let names: string[] = [];
  let wrong: string | null = null;
  try {
    names = toolsIn(settings.tools).names;
  } catch (error) {
    wrong = said(error);
  }
  return (
    <fieldset>
      <legend>Tools</legend>
      <label for="set-tools">Functions as JSON, as in OpenAI's API</label>
      <textarea
        id="set-tools"
        class="mono"
        rows={5}
        spellcheck={false}
        value={settings.tools}
        onInput={set("tools")}
        placeholder="[]"
        aria-invalid={wrong !== null}
        aria-describedby={wrong ? "tools-wrong" : undefined}
      />
      {wrong && (
        <p id="tools-wrong" class="wrong" role="alert">
          {wrong}
        </p>
      )}
      {!settings.tools && (
        <button type="button" class="quiet" onClick={() => onSettings({ ...settings, tools: EXAMPLE_TOOLS })}>
          Fill in an example
        </button>
      )}
      <label for="set-choice">Tool choice</label>
      <select id="set-choice" value={settings.tool_choice} onChange={set("tool_choice")}>
        <option value="">auto: the model decides</option>
        <option value="required">required: it must call one</option>
        <option value="none">none</option>
        {names.map((name) => (
          <option key={name} value={`=${name}`}>
            {name}
          </option>
        ))}
      </select>
      <p class="hint">“auto” needs a service with --enable-auto-tool-choice.</p>
    </fieldset>
  );
}
