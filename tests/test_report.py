import json

import report


def test_curves_are_drawn_from_a_run_with_gaps_and_a_half_written_line(tmp_path):
    lines = [{"update": 0, "val/success": 0.3}, {"update": 1, "rollout/success": 0.4, "policy/entropy": None}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"update": 2, "rollout/suc'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert report.load_metrics(tmp_path) == lines
    assert report.curves(tmp_path).read_bytes()[:4] == b"\x89PNG"
