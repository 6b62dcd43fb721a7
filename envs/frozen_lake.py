"""FrozenLake as text: walk from the start to the goal, keep out of the holes, on ice that may be slippery."""

import string
from collections import deque

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding

# Left, Down, Right, Up is gymnasium's numbering (0..3), and also the order in which solve() breaks ties.
MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
SYMBOLS = {
    "player": "P", "ice": "_", "hole": "O", "goal": "G", "player in a hole": "X", "player on the goal": "√",
}  # fmt: skip
MAX_MAPS = 10_000  # a map is accepted within a few draws; the bound turns impossible options into an error


def shortest_path(rows, start):
    """Shortest list of action names from `start` (row, column) to G if every move goes where it is aimed.

    [] on the goal, None from a hole or when holes cut the goal off. Ties go to the earlier name in MOVES.
    """
    if rows[start[0]][start[1]] == "H":
        return None
    paths, frontier = {start: []}, deque([start])
    while frontier:
        row, col = cell = frontier.popleft()
        if rows[row][col] == "G":
            return paths[cell]
        for name, (down, right) in MOVES.items():
            r, c = row + down, col + right
            if 0 <= r < len(rows) and 0 <= c < len(rows[0]) and rows[r][c] != "H" and (r, c) not in paths:
                paths[r, c] = paths[cell] + [name]
                frontier.append((r, c))
    return None


def draw_map(rng, size, frozen_prob, solvable_within):
    """Rows of S, F, H, G with random start and goal at most `solvable_within` actions apart (0: no limit)."""
    for _ in range(MAX_MAPS):
        cells = [["F" if ice else "H" for ice in row] for row in rng.random((size, size)) < frozen_prob]
        start, goal = (divmod(int(i), size) for i in rng.choice(size * size, size=2, replace=False))
        cells[start[0]][start[1]], cells[goal[0]][goal[1]] = "S", "G"
        path = shortest_path(cells, start)
        if path is not None and len(path) <= (solvable_within or size * size):
            return ["".join(row) for row in cells]
    raise ValueError(
        f"none of {MAX_MAPS} maps of size {size} and frozen_prob {frozen_prob} has its goal within "
        f"{solvable_within} actions of the start; raise frozen_prob or solvable_within"
    )


class FrozenLake(gymnasium.Env):
    """Gymnasium's FrozenLake dynamics on a random map, told in text.

    ## Observation
    `observation="coord"`: one line a kind, as (row, column) from the top left corner, the player last:

        holes (1, 2), (3, 1)
        goal (0, 3)
        player (2, 0)

    Without holes the line is "holes none"; the last line of an episode ends in "on the goal" or "in a hole".
    `"grid"` shows the same state as below, `"grid_coord"` the grid and then the lines above.

        ___G
        __O_
        P___
        _O__

    ## Actions
    Left, Down, Right, Up, in any case. At the border a move stays put. With `slippery`, a move goes where it
    is aimed with probability `success_rate`, else to one of its two sides, each equally likely.

    ## Rewards
    1.0 on reaching the goal; 0.0 for all else: an ordinary move, a hole, the border, text that is no action.

    ## End
    `terminated` on the goal (success) or in a hole. Never `truncated`: budgets are the caller's to enforce.

    ## Reset
    `seed` decides map, start and goal; `options={"chance_seed": int}` decides the slips, so that members of a
    group share their start but not their luck. Without it the slips follow from `seed` too.

    ## Arguments
    `symbols`: replacements for entries of SYMBOLS. `desc`: an explicit map such as ("SFF", "HHF", "FFG"),
    used as it is in place of a random one. `map_seed`: the same map, start and goal whatever the seed (None:
    off). `solvable_within`: most actions the shortest path may need (None: `max_actions`, 0: no limit).

    ## Info
    Beside the three usual booleans: `slipped`, the move went to a side of where it was aimed.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}
    actions = tuple(MOVES)

    def __init__(
        self,
        size=4,
        frozen_prob=0.9,
        slippery=False,
        success_rate=0.8,
        observation="coord",
        symbols=None,
        desc=None,
        map_seed=None,
        solvable_within=None,
        max_turns=5,
        max_actions=10,
        render_mode=None,
    ):
        solvable_within = max_actions if solvable_within is None else solvable_within
        whole_numbers = {"size": (size, 2), "max_turns": (max_turns, 1), "max_actions": (max_actions, 1),
                         "solvable_within": (solvable_within, 0), "map_seed": (map_seed or 0, 0)}  # fmt: skip
        for name, (value, least) in whole_numbers.items():
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}; try {least}")
        for name, value in (("frozen_prob", frozen_prob), ("success_rate", success_rate)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be a probability in [0, 1], got {value!r}; try 0.8")
        if observation not in ("coord", "grid", "grid_coord"):
            raise ValueError(f"observation must be 'coord', 'grid' or 'grid_coord', got {observation!r}")
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode must be None or 'ansi', got {render_mode!r}; none is drawn")
        if unknown := set(symbols or {}) - set(SYMBOLS):
            raise ValueError(f"symbols has unknown entries {sorted(unknown)}; use some of {list(SYMBOLS)}")
        self._symbols = SYMBOLS | (symbols or {})
        marks = list(self._symbols.values())
        if any(len(mark) != 1 or mark.isspace() for mark in marks) or len(set(marks)) < len(marks):
            raise ValueError(f"symbols must be different visible characters, got {marks}; change some")
        if desc is not None:
            cells = "".join(desc)
            one_each = cells.count("S") == cells.count("G") == 1
            if len({len(row) for row in desc}) != 1 or set(cells) - set("SFHG") or not one_each:
                raise ValueError(
                    "desc must be rows of one length made of S, F, H and G with one S and one G, "
                    f"got {desc!r}; try ('SFF', 'HHF', 'FFG')"
                )

        self.max_turns, self.max_actions, self.render_mode = max_turns, max_actions, render_mode
        self._observation, self._desc, self._map_seed = observation, desc, map_seed
        self._map_options = size, frozen_prob, solvable_within
        self._slippery, self._success_rate = slippery, success_rate
        self._lake, self._over, self._text = None, False, None

        height, width = (len(desc), len(desc[0])) if desc else (size, size)
        self.instruction = f"Walk on a frozen lake of {height} x {width} cells to the goal. Holes end the walk."
        if slippery:
            self.instruction += (
                f" The ice is slippery: you move where you aim with probability {success_rate:g}, "
                "else to one of the two sides."
            )
        if "grid" in observation:
            legend = ", ".join(f"{mark} {kind}" for kind, mark in self._symbols.items())
            self.instruction += f" Symbols: {legend}."
        if "coord" in observation:
            self.instruction += " Cells are (row, column); (0, 0) is top left, Down adds 1 to the row."
        # Sets of characters have no stable order over processes, and spaces sample by position: sorted.
        written = "".join(sorted(set(string.ascii_letters + string.digits + "(), \n" + "".join(marks))))
        self.action_space = gymnasium.spaces.Text(max_length=16, charset=string.ascii_letters)
        self.observation_space = gymnasium.spaces.Text(max_length=64 + 16 * height * width, charset=written)

    def reset(self, *, seed=None, options=None):
        options = options or {}
        if unknown := set(options) - {"chance_seed"}:
            raise ValueError(f"reset has the option chance_seed only, got {sorted(unknown)}; drop these")
        super().reset(seed=seed)
        map_rng = self.np_random if self._map_seed is None else seeding.np_random(self._map_seed)[0]
        self._rows = self._desc or draw_map(map_rng, *self._map_options)
        # Drawn even if the caller gives one: later resets without a seed must not depend on who gave what.
        chance_seed = int(self.np_random.integers(2**31))
        if options.get("chance_seed") is not None:
            chance_seed = int(options["chance_seed"])
        # Gymnasium's map generator pins start and goal to the corners, so the map is ours and the rest its.
        self._lake = FrozenLakeEnv(desc=list(self._rows), is_slippery=self._slippery, success_rate=self._success_rate)
        start, _ = self._lake.reset(seed=chance_seed)
        self._player = divmod(int(start), len(self._rows[0]))
        self._over, self._text = False, self._describe()
        return self._text, self._info()

    def step(self, action):
        if self._lake is None or self._over:
            raise ResetNeeded("step() needs a running episode; call reset() first and after its end")
        name = action.strip().capitalize()
        if name not in MOVES:
            return self._text, 0.0, False, False, self._info(valid=False)
        before, (height, width) = self._player, (len(self._rows), len(self._rows[0]))
        cell, reward, terminated, _, _ = self._lake.step(self.actions.index(name))
        self._player = divmod(int(cell), width)
        self._over, self._text = bool(terminated), self._describe()
        down, right = MOVES[name]
        aim = min(max(before[0] + down, 0), height - 1), min(max(before[1] + right, 0), width - 1)
        info = self._info(effective=self._player != before, slipped=self._player != aim)
        return self._text, float(reward), self._over, False, info

    def solve(self):
        """Shortest plan from here as if nothing slipped; [] on the goal, None in a hole or without a way."""
        if self._lake is None:
            raise ResetNeeded("solve() needs a state; call reset() first")
        return shortest_path(self._rows, self._player)

    def render(self):
        return self._text

    def _info(self, valid=True, effective=False, slipped=False):
        row, col = self._player
        success = self._rows[row][col] == "G"
        flags = {"success": success, "action_is_valid": valid, "action_is_effective": effective}
        return flags | {"slipped": slipped}

    def _describe(self):
        row, col = self._player
        ending = {"G": " on the goal", "H": " in a hole"}.get(self._rows[row][col], "")
        lines = []
        if "grid" in self._observation:
            kinds = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}
            grid = [[self._symbols[kinds[cell]] for cell in cells] for cells in self._rows]
            grid[row][col] = self._symbols["player" + ending]
            lines += ["".join(marks) for marks in grid]
        if "coord" in self._observation:
            cells = [(kind, (r, c)) for r, line in enumerate(self._rows) for c, kind in enumerate(line)]
            holes = ", ".join(str(where) for kind, where in cells if kind == "H") or "none"
            goal = next(where for kind, where in cells if kind == "G")
            lines += [f"holes {holes}", f"goal {goal}", f"player {self._player}{ending}"]
        return "\n".join(lines)
