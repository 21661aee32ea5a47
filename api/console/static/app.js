// Starts the parts of the console, and what belongs to none of them: what is served, and the colours.

import { startAdapters } from "./adapters.js";
import { askJson, session } from "./api.js";
import { startCharts } from "./charts.js";
import { byId, setText } from "./dom.js";
import { startKey } from "./key.js";
import { startPoolMap } from "./pool_map.js";
import { pulse } from "./pulse.js";
import { startSummary } from "./summary.js";
import { startTryIt } from "./try_it.js";
import { startUpload } from "./upload.js";

const THEME = "lorasrv.theme";

function startTheme() {
  const chosen = document.documentElement.dataset.theme ?? "auto";
  for (const input of byId("themes").querySelectorAll("input")) {
    input.checked = input.value === chosen;
    input.addEventListener("change", () => {
      if (input.value === "auto") {
        delete document.documentElement.dataset.theme;
        localStorage.removeItem(THEME);
      } else {
        document.documentElement.dataset.theme = input.value;
        localStorage.setItem(THEME, input.value);
      }
      document.dispatchEvent(new Event("themechange"));
    });
  }
}

/** What runs here; a key may not be allowed to know all of it. */
async function showServed() {
  try {
    const info = await askJson("GET", "/info");
    setText(byId("served"), `${info.model_id} · ${info.quantization} · ${info.version}`);
  } catch {
    setText(byId("served"), "");
  }
}

startTheme();
startKey();
startSummary();
startPoolMap();
startCharts();
startTryIt();
startAdapters();
startUpload();
session.addEventListener("key", showServed);
let wasLost = false;
pulse.addEventListener("beat", () => {
  if (wasLost && pulse.state === "live") showServed();
  wasLost = pulse.state === "lost";
});
showServed();
pulse.start();
