"""The page of report.py: what is in it, what cannot get out of it, and how it behaves in a browser."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import report

NASTY = (
    "<img src=x onerror='window.hacked = 1'></script><script>window.hacked = 2</script> \u2028 &amp; \ud800 {{ 7 * 7 }}"
)
REASON = "I(X;Z) needs thinking after at least 2 different prompts; there were <b>1</b>"


def write_lines(path, records, rest=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + rest)


def diagnosed(update, last):
    """H(Z|X) stays high while I(X;Z) goes to 0: template collapse."""
    mi = 2.0 * (1 - update / last)
    numbers = {
        "conditional_entropy_est": 1.1, "mi_seq_estimate": mi, "mi_upper_bound": 2.77,
        "retrieval_accuracy": mi / 2.5, "retrieval_chance_level": 0.0625,
    }  # fmt: skip
    spans = {f"diagnostics/{span}/{k}": v for span in ("first_turn", "trajectory") for k, v in numbers.items()}
    return spans | {"diagnostics/regime": "diverse" if mi > 1 else "template_collapse"}


def probed(update):
    metrics = {}
    for n, bucket in enumerate(["all", "bucket_1", "bucket_2", "bucket_3"]):
        metrics |= {
            f"grad_norm/{bucket}/task": 0.1 * n + 0.01 * update, f"grad_norm/{bucket}/entropy": 0.2,
            f"grad_norm/{bucket}/kl": 0.05, f"grad_norm/{bucket}/ratio": 0.4, f"grad_norm/{bucket}/snr": None,
            f"grad_norm/{bucket}/reward_std_mean": 0.1 * n, f"grad_norm/{bucket}/reward_std_min": 0.0,
            f"grad_norm/{bucket}/reward_std_max": 0.25, f"grad_norm/{bucket}/groups": 4.0,
            f"grad_norm/{bucket}/tokens": 1234.0,
        }  # fmt: skip
    return metrics


def trajectory(update, phase, group, member, success):
    turns = [
        {"user": "u", "observation": "wall " + NASTY, "response": NASTY, "thinking": None, "actions": [], "reward": 0.0,
         "penalty": -0.1, "valid": False, "effective": False, "tokens": 12, "finish_reason": "length", "info": {}},
        {"user": "u", "observation": "holes none", "response": "<think>go</think><answer>Left</answer>",
         "thinking": "go " + NASTY, "actions": ["Left", "Up"], "reward": float(success), "penalty": 0.0, "valid": True,
         "effective": True, "tokens": 7, "finish_reason": "stop", "info": {}},
        {"user": "u", "observation": "no room left"},
    ]  # fmt: skip
    segments = [("prompt " + NASTY, False, 30), (NASTY, True, 12), ("next", False, 5), ("go", True, 7)]
    samples = [[{"text": text, "trained": trained, "tokens": tokens} for text, trained, tokens in segments]]
    return {"update": update, "phase": phase, "env": "frozen_lake", "group": group, "member": member,
            "success": success, "ended": "context", "rewards": [0.0, float(success)], "penalties": [-0.1, 0.0],
            "turns": turns, "samples": samples}  # fmt: skip


def make_run(folder: Path, seed=1, last=12) -> Path:
    """A run with nulls, notes, diagnostics every 3 updates, probes every 4, nasty text and torn lines."""
    folder.mkdir(parents=True)
    args = {"env": ["frozen_lake"], "model": "tiny", "seed": seed, "filter": "none", "ent_coef": 0.001, "kl_coef": 0.01,
            "run_root": str(folder)}  # fmt: skip
    (folder / "args.json").write_text(json.dumps(args))
    (folder / "starpo_ppo.py").write_text("")
    records = [{"update": 0, "val/success": 0.3, "val/return": 0.3, "time/val": 3.0, **diagnosed(0, last)}]
    for update in range(1, last + 1):
        record = {
            "update": update, "rollout/success": 0.3 + 0.02 * update, "rollout/return": 0.3,
            "rollout/in_group_std": 0.2, "policy/entropy": None if update == 2 else 1.0, "rollout/kept_share": 0.5,
            "rollout/dead_groups": 0.25, "policy/grad_norm": 0.5, "value/grad_norm": 1.5, "time/rollout": 1.0,
            "time/train": 4.0,
        }  # fmt: skip
        record |= {"notes": {"policy/*": REASON}} if update in (2, 3, 7) else {}
        record |= diagnosed(update, last) | {"time/diagnostics": 2.0} if update % 3 == 0 else {}
        record |= probed(update) | {"time/probe": 1.0} if update % 4 == 0 else {}
        record |= {"val/success": 0.4 + 0.02 * update, "val/return": 0.5, "time/val": 3.0} if update % 4 == 0 else {}
        records.append(record)
    write_lines(folder / "metrics.jsonl", records, rest='{"update": 99, "rollout/suc')
    old = trajectory(0, "val", 0, 0, False)
    del old["env"], old["samples"], old["turns"][1]["thinking"], old["turns"][0]["thinking"]
    episodes = [trajectory(u, "train", g, m, m == 1) for u in (1, 2) for g in (0, 1) for m in (0, 1)]
    episodes[1]["turns"][0]["reward"] = float("nan")
    write_lines(folder / "trajectories.jsonl", [old, *episodes], rest='null\n"text"\n{"update": 3, "turns": [')
    return folder


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [make_run(root / "lake-1", seed=1), make_run(root / "lake-2", seed=2)]


@pytest.fixture(scope="module")
def html_file(two_runs, tmp_path_factory):
    return report.page(two_runs, tmp_path_factory.mktemp("page") / "new" / "page.html")


@pytest.fixture(scope="module")
def html(html_file):
    return html_file.read_text(encoding="utf-8")


def captions(html):
    return [re.sub(r"\s*<small>.*", "", caption) for caption in re.findall(r"<figcaption>(.*?)</figcaption>", html)]


def data_of(html):
    """What the page's script reads; the element ends at the first "</script>", as it does for a browser."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL).group(1))


def test_curves_are_drawn_from_a_run_with_gaps_and_a_half_written_line(tmp_path):
    lines = [{"update": 0, "val/success": 0.3}, {"update": 1, "rollout/success": 0.4, "policy/entropy": None}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"update": 2, "rollout/suc'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert report.load_metrics(tmp_path) == lines
    assert report.curves(tmp_path).read_bytes()[:4] == b"\x89PNG"


def test_page_has_every_panel(html):
    assert captions(html) == [
        "success", "return", "spread inside a group", "entropy", "I(X;Z), first turns", "retrieval, first turns",
        "I(X;Z), any turn", "retrieval, any turn", "filter", "gradient norm", "time, seed 1", "time, seed 2",
        *["gradient norm, task", "gradient norm, entropy", "gradient norm, kl"] * 2,
    ]  # fmt: skip
    assert html.count("<svg ") == len(captions(html)) + 1  # and the plane
    for regime in ("diverse", "template collapse", "compressed", "low-entropy collapse"):
        assert f">{regime}</text>" in html
    for line in ("its bound, ln N", "by chance", "H(Z|X), thinking", "critic"):
        assert line in html


def test_page_says_how_runs_differ_and_how_they_ended(html):
    assert html.count("<dt>seed</dt>") == 2 and "<dt>env</dt>" not in html
    assert html.count("0.64 at update 12") == 2 and html.count("template collapse at update 12") == 2


def test_page_of_one_run_says_what_it_is(two_runs):
    path = report.page(two_runs[:1])
    assert path == two_runs[0] / "report" / "index.html"
    html = path.read_text(encoding="utf-8")
    for name, value in {"method": "ppo", "env": "frozen_lake", "seed": "1", "kl_coef": "0.01"}.items():
        assert f"<dt>{name}</dt><dd>{value}</dd>" in html
    assert "time" in captions(html) and "run_root" not in html


def test_notes_are_listed_once_with_their_updates(html):
    assert html.count("<td>2–3, 7</td>") == 2
    assert "<b>" not in html and "&lt;b&gt;1&lt;/b&gt;" in html


def test_a_place_that_cannot_be_written_is_named_without_a_traceback(tmp_path, capsys):
    write_lines(tmp_path / "metrics.jsonl", [{"update": 1, "rollout/success": 0.5}])
    with pytest.raises(SystemExit) as stop:
        report.main((tmp_path,), Path("/proc/nowhere/page.html"))
    assert stop.value.code == 2 and "/proc/nowhere" in capsys.readouterr().err


def test_warnings_stand_on_the_card_of_their_run_and_not_among_the_notes(tmp_path):
    line = "template collapse: entropy is up 4 percent <b>"
    records = [{"update": 5, "rollout/success": 0.5}, {"update": 6, "notes": {"warning/template_collapse": line}}]
    write_lines(tmp_path / "metrics.jsonl", records)
    html = report.page([tmp_path]).read_text()
    card = html[html.index('id="runs"') : html.index('id="curves"')]
    assert "Update 6: template collapse: entropy is up 4 percent &lt;b&gt;" in card
    assert 'id="notes"' not in html


def test_gradient_that_is_not_known_has_no_bar(tmp_path):
    keys = {f"grad_norm/bucket_{b}/task": value for b, value in ((1, None), (2, 0.5))}
    write_lines(tmp_path / "metrics.jsonl", [{"update": 1, **keys}])
    (run,) = report.load_runs([tmp_path])
    heights = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.axes.Axes.bar", lambda self, x, height, *_, **__: heights.extend(height))
        patch.setattr(report, "finish", lambda axis: None)
        report.gradient_probes(run)
    assert np.isnan(heights[0]) and heights[1] == 0.5


def test_what_a_run_lacks_leaves_no_empty_panel(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"update": 1, "rollout/success": 0.5, "rollout/return": None}])
    html = report.page([tmp_path]).read_text()
    assert captions(html) == ["success"]
    for section in ("plane", "buckets", "notes", "data"):
        assert f'id="{section}"' not in html


def test_a_run_without_updates_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No numbers yet." in report.page([tmp_path]).read_text()
    assert report.curves(tmp_path).exists()


def test_page_refers_to_nothing_outside(html):
    references = re.findall(
        r"""(?:src|href|url|@import)\s*[=(]\s*["']?([^"'\s)>]*)""", re.sub(r"<script.*", "", html, flags=re.S)
    )
    assert references and all(reference.startswith(("#", "data:,")) for reference in references)
    assert "http://" not in html and "https://" not in html
    assert "default-src 'none'" in html


def test_model_text_comes_back_as_it_was_and_ends_no_element(html):
    data = data_of(html)
    assert data["trajectories"][1]["turns"][1]["thinking"] == "go " + NASTY
    assert data["trajectories"][2]["turns"][0]["reward"] is None  # NaN
    assert len(data["trajectories"]) == 2 * 9  # without the torn line
    assert "<img" not in html and "\u2028" not in html
    assert html.count("<script") == html.count("</script>") == 2


def test_long_run_leaves_trajectories_out_and_says_how_many(two_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "TRAJECTORY_BYTES", 12_000)
    html = report.page(two_runs[:1], tmp_path / "page.html").read_text(encoding="utf-8")
    kept = len(data_of(html)["trajectories"])
    assert 2 <= kept < 9 and f"{9 - kept} of 9 logged trajectories are left" in html


def test_room_goes_to_the_newest_and_to_evenly_spread_older_ones():
    records = [{"n": f"{n:03d}"} for n in range(100)]  # each 12 bytes
    kept = [int(record["n"]) for record in report.that_fit(records, budget=480)]
    assert kept == [*range(0, 80, 4), *range(80, 100)]
    assert report.that_fit(records, budget=1200) == records
    assert report.that_fit(records, budget=5) == []


def test_long_curves_are_thinned_up_to_the_last_update():
    assert report.thinned(list(range(10))) == list(range(10))
    thinned = report.thinned(list(range(5001)))
    assert len(thinned) <= report.MOST_POINTS + 1 and thinned[-1] == 5000


def run_script(*arguments):
    command = [sys.executable, Path(report.__file__), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_script_writes_page_and_curves_and_prints_the_path(tmp_path):
    run = make_run(tmp_path / "lake")
    result = run_script(run, "--output", tmp_path / "page.html")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{tmp_path / 'page.html'}\n", "")
    assert (tmp_path / "page.html").exists() and (run / "curves.png").exists()


def test_script_refuses_what_is_no_run_and_names_those_nearby(two_runs):
    result = run_script(two_runs[0].parent / "lake-3")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "a run is a folder with metrics.jsonl" in result.stderr
    for name in ("lake-1", "lake-2", "lake-3"):
        assert name in result.stderr


def test_page_refuses_no_run_and_a_folder_as_output(two_runs, tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        report.page([])
    with pytest.raises(ValueError, match="is a folder"):
        report.page(two_runs, tmp_path)


# ======================================================================================================================
# In a browser
# ======================================================================================================================
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
in_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and not os.environ.get("CI"), reason="needs Debian's chromium and chromium-driver"
)


@pytest.fixture(scope="module")
def chromium():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or "/usr/bin/chromium"
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER or "/usr/bin/chromedriver")
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium, html_file):
    chromium.get("about:blank")  # else a new hash alone loads nothing
    for log in ("browser", "performance"):
        chromium.get_log(log)
    chromium.set_window_size(1200, 900)
    chromium.get(html_file.as_uri())
    yield chromium
    assert [entry for entry in chromium.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert chromium.execute_script("return window.hacked") is None


def text(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0]).textContent.toWellFormed()", selector)


def choose(browser, **values):
    for name, value in values.items():
        browser.execute_script(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('change'))", name, value,
        )  # fmt: skip


def click(browser, name):
    browser.execute_script("document.getElementById(arguments[0]).click()", name)


@in_browser
def test_nasty_text_is_shown_and_does_not_run(browser):
    choose(browser, phase="train")
    shown = text(browser, "#trajectory")
    assert "<img src=x onerror='window.hacked = 1'></script><script>window.hacked = 2</script>" in shown
    assert browser.execute_script("return document.querySelectorAll('#trajectory img, #trajectory script').length") == 0


@in_browser
def test_page_asks_the_network_for_nothing(browser):
    for name in ("next", "tokens"):
        click(browser, name)
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert urls and [url for url in urls if not url.startswith(("file:", "data:", "about:"))] == []


@in_browser
def test_filters_count_what_matches(browser):
    for values, count in [
        ({}, "1 of 18"), ({"phase": "train"}, "1 of 16"), ({"success": "success"}, "1 of 8"), ({"run": "1"}, "1 of 4"),
        ({"update": "2"}, "1 of 2"), ({"group": "1"}, "1 of 1"), ({"phase": "val"}, "0 of 0"),
    ]:  # fmt: skip
        choose(browser, **values)
        assert text(browser, "#count") == count


@in_browser
def test_next_and_previous_walk_by_click_and_by_key(browser):
    from selenium.webdriver.common.keys import Keys

    assert not browser.find_element("id", "previous").is_enabled()
    click(browser, "next")
    assert text(browser, "#count") == "2 of 18" and "Update 1, train, group 0, member 0" in text(browser, "#trajectory")
    browser.find_element("tag name", "body").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert text(browser, "#count") == "4 of 18"
    click(browser, "previous")
    assert text(browser, "#count") == "3 of 18"


@in_browser
def test_turns_show_what_happened(browser):
    choose(browser, phase="train", success="success")
    turns = browser.execute_script(
        "return [...document.querySelectorAll('article')].map(n => n.textContent.toWellFormed())"
    )
    assert "invalid" in turns[0] and "cut at the limit" in turns[0] and "penalty -0.1" in turns[0]
    assert "Left  Up" in turns[1] and "reward 1" in turns[1] and "7 tokens" in turns[1] and "go <img" in turns[1]
    assert "ended before a response" in turns[2]


@in_browser
def test_token_switch_marks_trained_text(browser):
    click(browser, "tokens")
    assert "Tokens are not in this file" in text(browser, "#trajectory")  # of an older version
    click(browser, "next")
    trained = browser.execute_script(
        "return [...document.querySelectorAll('pre .trained')].map(n => n.textContent.toWellFormed())"
    )
    assert trained == [NASTY.replace("\ud800", "\ufffd"), "go"]
    colours = browser.execute_script(
        "return [...document.querySelectorAll('pre span')].map(n => getComputedStyle(n).backgroundColor)"
    )
    assert colours[0] == colours[2] != colours[1] == colours[3]
    assert "19 tokens are trained" in text(browser, "#trajectory")


@in_browser
def test_link_leads_to_the_same_trajectory(browser):
    choose(browser, run="1", success="failure")
    for name in ("next", "next", "tokens"):
        click(browser, name)
    link, shown = browser.current_url, text(browser, "#trajectory")
    browser.get("about:blank")
    browser.get(link)
    assert text(browser, "#count") == "3 of 5" and text(browser, "#trajectory") == shown


@in_browser
@pytest.mark.parametrize("tokens", [False, True])
def test_phone_scrolls_in_one_direction(browser, tokens):
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        choose(browser, phase="train")
        if tokens:
            click(browser, "tokens")
        assert browser.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
