import { html, useState } from "../lib/html.js";
import { login } from "../lib/store.js";

export function Login() {
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);

  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      await login(new FormData(event.target).get("key").trim());
    } catch (problem) {
      setError(problem.message);
    } finally {
      setBusy(false);
    }
  }

  return html`
    <main class="login">
      <form onSubmit=${submit}>
        <h1>tokenbus console</h1>
        <label for="key">Key of the gateway</label>
        <input id="key" name="key" type="password" autocomplete="current-password" required autofocus
          aria-describedby="login-hint" aria-invalid=${error ? "true" : undefined} />
        <p id="login-hint" class="mute">A key with console roles: <code>tokenbus keys create --console see_runs,act</code></p>
        ${error && html`<p class="error" role="alert">${error}</p>`}
        <button class="main" disabled=${busy}>Log in</button>
      </form>
    </main>`;
}
