// Builds ../static of this folder. The same sources and lock file give the same bytes, which `make check-ui` checks.

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "..", "static");
const modules = join(here, "node_modules");
const swagger = join(modules, "swagger-ui-dist");

const files = new Map(); // name in the page's source -> [name in static, content]

function add(name, content, { digest = true } = {}) {
  const text =
    content
      .toString("utf8")
      .replace(/\n?\/[/*]# sourceMappingURL=.*/g, "")
      .trimEnd() + "\n";
  const hash = createHash("sha256").update(text).digest("hex").slice(0, 8).toUpperCase();
  files.set(name, [digest ? name.replace(/(\.\w+)$/, `-${hash}$1`) : name, text]);
}

const built = await build({
  entryPoints: ["app.tsx", "app.css", "docs.ts", "docs.css"].map((name) => join(here, "src", name)),
  bundle: true,
  minify: true,
  write: false,
  outdir: "/out",
  format: "esm",
  target: ["es2022"],
  legalComments: "none",
  logLevel: "warning",
});
for (const file of built.outputFiles) add(file.path.split(/[\\/]/).pop(), Buffer.from(file.contents));
add("swagger-ui.js", readFileSync(join(swagger, "swagger-ui-bundle.js")));
add("swagger-ui.css", readFileSync(join(swagger, "swagger-ui.css")));
add("icon.svg", readFileSync(join(here, "src", "icon.svg")));
add("LICENSES.txt", licences(), { digest: false });
for (const page of ["index.html", "docs.html"]) {
  const text = readFileSync(join(here, "src", page), "utf8");
  add(
    page,
    text.replace(/\{\{(.+?)\}\}/g, (_, name) => `ui/${files.get(name)[0]}`),
    { digest: false },
  );
}

function licences() {
  const head =
    "Texts of the licences of what is in the files beside this one. All else in them is Tandem's, Apache 2.0.\n";
  const parts = ["preact", "marked", "swagger-ui-dist"].map((name) => {
    const folder = join(modules, name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const texts = readdirSync(folder)
      .filter((file) => /^(licen[cs]e|notice|swagger-ui-bundle.*license)/i.test(file))
      .sort();
    const shown = texts.map((file) => readFileSync(join(folder, file), "utf8").trim());
    return [`${"=".repeat(100)}\n${name} ${version} (${license})\n${"=".repeat(100)}`, ...shown].join("\n\n");
  });
  return [head, ...parts].join("\n");
}

mkdirSync(out, { recursive: true });
for (const name of readdirSync(out)) rmSync(join(out, name));
for (const [name, text] of files.values()) writeFileSync(join(out, name), text);
