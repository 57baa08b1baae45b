"""A page in a headless Chromium, driven by Selenium."""

from __future__ import annotations

from typing import Any

from tests.support.timing import until

ENTER, TAB, RIGHT, LEFT, HOME, END = "\ue007", "\ue004", "\ue014", "\ue012", "\ue011", "\ue010"
TABS = ("chat", "live", "requests")


class Page:
    """The one page that a driver has open."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Open the page of a server, and wait until it has chosen a tab."""
        self.driver.get(url)
        until(lambda: "#" in self.driver.current_url)

    def leave(self) -> None:
        """Close the page, and forget what it stored and logged."""
        self.run("sessionStorage.clear()")
        self.driver.get("about:blank")
        self.driver.get_log("browser")

    def size(self, width: int, height: int) -> None:
        """Set the size of the screen, which may be narrower than windows can be."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)

    def scheme(self, name: str) -> None:
        """Prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script, and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def get(self, selector: str) -> Any:
        """Return the element that a CSS selector names first."""
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        """Return the elements that a CSS selector names."""
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def text(self, selector: str) -> str:
        """Return the text of an element, also of one that is hidden."""
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def press(self, keys: str) -> None:
        """Press keys where the focus is."""
        self.driver.switch_to.active_element.send_keys(keys)

    @property
    def focused(self) -> str:
        """The id of the element that has the focus."""
        return str(self.run("return document.activeElement.id"))

    def choose(self, tab: str) -> None:
        """Open a tab by its mouse click."""
        self.get(f"#tab-{tab}").click()

    def say(self, text: str) -> None:
        """Send a message, and wait for the end of its answer."""
        before = len(self.all("#chat-log .kept"))
        self.get("#prompt").send_keys(text + ENTER)
        until(lambda: len(self.all("#chat-log .kept")) > before and not self.get("#chat-stop").is_enabled())

    @property
    def problems(self) -> list[str]:
        """What the console has said since it was last looked at."""
        return [one["message"] for one in self.driver.get_log("browser")]

    def violations(self, axe: str) -> list[str]:
        """Return what axe-core finds wrong with what the page shows."""
        self.run(axe)
        done = "const done = arguments[arguments.length - 1]; axe.run().then(done)"
        found = self.driver.execute_async_script(done)["violations"]
        return [f"{one['id']}: {one['help']} {[node['target'] for node in one['nodes']]}" for one in found]
