// The page at /docs: Swagger UI over openapi.json. Requests that are tried go to the address that this page came from,
// whatever path a proxy has put before it.

interface Options {
  spec: unknown;
  domNode: HTMLElement;
  [name: string]: unknown;
}

declare const SwaggerUIBundle: (options: Options) => void;

const place = document.getElementById("reference")!;
const isDark = matchMedia("(prefers-color-scheme: dark)");
const dress = () => document.documentElement.classList.toggle("dark-mode", isDark.matches);
isDark.addEventListener("change", dress);
dress();

async function show(): Promise<void> {
  const answer = await fetch("openapi.json");
  if (!answer.ok) throw new Error(`openapi.json answered with status ${answer.status}`);
  const spec = (await answer.json()) as Record<string, unknown>;
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  place.replaceChildren();
  SwaggerUIBundle({
    spec: { ...spec, servers: [{ url: base }] },
    domNode: place,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    deepLinking: false,
    persistAuthorization: false,
    validatorUrl: null,
    filter: true,
    tryItOutEnabled: false,
    syntaxHighlight: { activated: false },
  });
}

show().catch((error: unknown) => {
  place.textContent = `The API reference cannot be shown: ${error instanceof Error ? error.message : String(error)}.`;
});
