"""Sokoban as text: push every box onto a target. No box can be pulled, so some moves cannot be undone."""

import string
from collections import deque

import gymnasium
from gymnasium.error import ResetNeeded

# (rows, columns). The order is the one in which solve() and the level search break ties.
MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
SYMBOLS = {
    "wall": "#", "floor": "_", "target": "O", "box on target": "√", "box": "X", "player": "P",
    "player on target": "S",
}  # fmt: skip
# Floor carved around a cell when a room is drawn: two bars, two corners, a block; each holds the cell itself.
STAMPS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
MAX_STATES = 300_000  # of one search; it bounds time and memory in rooms with many boxes
MAX_LEVELS = 1000  # draws of one reset; most options need a few, impossible ones end in an error

# A cell is row * width + column. Walls close every room, so that an offset never wraps into the next row.


def moved(floor, player, boxes, offset):
    """(player, boxes) after one move; the same objects when a wall or a box stops it."""
    ahead, beyond = player + offset, player + 2 * offset
    if ahead not in floor or (ahead in boxes and (beyond not in floor or beyond in boxes)):
        return player, boxes
    return ahead, (boxes - {ahead}) | {beyond} if ahead in boxes else boxes


def shortest_solution(floor, targets, player, boxes, offsets, max_actions=None):
    """Indices into `offsets` of a shortest solution: [] when solved, None if more than `max_actions` long.

    None also if there is none or MAX_STATES states came first. Ties go to the earlier offsets.
    """
    start = (player, boxes)
    came_from, frontier = {start: None}, deque([(start, 0)])
    while frontier and len(came_from) < MAX_STATES:
        state, depth = frontier.popleft()
        if state[1] == targets:
            path = []
            while came_from[state] is not None:
                state, move = came_from[state]
                path.append(move)
            return path[::-1]
        if depth == max_actions:
            continue
        for move, offset in enumerate(offsets):
            after = moved(floor, *state, offset)
            if after not in came_from:
                came_from[after] = (state, move)
                frontier.append((after, depth + 1))
    return None


def carve_floor(rng, height, width):
    """Floor cells that a random walk stamps into a room of walls; they are connected."""
    floor, directions = set(), list(MOVES.values())
    row, col = int(rng.integers(1, height)), int(rng.integers(1, width))
    down, right = directions[rng.integers(4)]
    for _ in range(int(1.7 * (height + width))):
        if rng.random() < 0.35:
            down, right = directions[rng.integers(4)]
        row, col = min(max(row + down, 1), height - 2), min(max(col + right, 1), width - 2)
        for r, c in STAMPS[rng.integers(len(STAMPS))]:
            if 0 < row + r < height - 1 and 0 < col + c < width - 1:
                floor.add((row + r) * width + col + c)
    return floor


def play_backwards(floor, targets, player, width, offsets, search_depth):
    """Best (player, boxes, distance) among the states that pulling boxes off `targets` reaches.

    Depth first; every move drags along the box behind the player, if there is one. A state scores the number
    of times that the pulled box changed (the first counts) times `distance`, the sum of all boxes' Manhattan
    distances in cells from their own targets; 0 unless all targets are empty. The first of the best is kept.
    """
    best, best_score = (player, targets, 0), 0
    seen = set()
    # An explicit stack: search_depth is an option, Python's recursion limit is not.
    stack = [(player, targets, None, 0, search_depth)]
    while stack and len(seen) < MAX_STATES:
        player, boxes, last_pulled, changes, depth_left = stack.pop()
        state = (player, frozenset(boxes))
        if depth_left <= 0 or state in seen:
            continue
        seen.add(state)
        if player not in targets and not state[1].intersection(targets):
            distance = sum(
                abs(box // width - home // width) + abs(box % width - home % width)
                for box, home in zip(boxes, targets, strict=True)
            )
            if changes * distance > best_score:
                best, best_score = (player, boxes, distance), changes * distance
        # Reversed, because the stack hands out last what was put in first.
        for offset in reversed(offsets):
            ahead, behind = player + offset, player - offset
            if ahead not in floor or ahead in state[1]:
                continue
            if behind in state[1]:
                pulled = boxes.index(behind)
                after = (*boxes[:pulled], player, *boxes[pulled + 1 :])
                stack.append((ahead, after, pulled, changes + (pulled != last_pulled), depth_left - 1))
            else:
                stack.append((ahead, boxes, last_pulled, changes, depth_left - 1))
    return best


def draw_level(rng, height, width, num_boxes, search_depth, offsets):
    """(floor, targets, player, boxes), solvable and with every box off target; None when the draw failed."""
    floor = carve_floor(rng, height, width)
    if len(floor) < num_boxes + 2:
        return None
    cells = sorted(floor)  # the order of a set is no order to draw from
    player, *targets = (cells[i] for i in rng.choice(len(cells), size=1 + num_boxes, replace=False))
    player, boxes, distance = play_backwards(floor, tuple(targets), player, width, offsets, search_depth)
    if distance == 0:
        return None
    # The search ends beside the box it pulled last, which gives the first push away: a short walk hides it.
    if rng.random() < (0.8 if distance == 1 else 0.5):
        walked = {player}
        for _ in range(3):
            free = [player + o for o in offsets if player + o in floor - walked - set(boxes)]
            if not free:
                break
            player = free[rng.integers(len(free))]
            walked.add(player)
            if rng.random() < 0.5:
                break
    return frozenset(floor), frozenset(targets), player, frozenset(boxes)


class Sokoban(gymnasium.Env):
    """A random solvable room with as many targets as boxes.

    ## Observation
    `observation="grid_coord"`: the grid, then one line a kind, as (row, column) from the top left corner, the
    player last; "on target" follows each box and the player where it holds, as in "boxes (2, 3) on target".

        ######
        #P_X_#
        #__O_#
        #____#
        ######
        targets (2, 3)
        boxes (1, 3)
        player (1, 1)

    `"grid"` and `"coord"` show one part; `"coord"` first lists the walls inside the room, here "walls none".

    ## Actions
    Up, Down, Left, Right, in any case. A move into a box pushes it if the cell behind is free; else nothing
    moves, and the step counts all the same.

    ## Rewards
    -0.1 an action, +1.0 or -1.0 when the number of boxes on targets rose or fell, +10.0 when all are there: a
    solution of n actions returns 10 + num_boxes - 0.1 n. Text that is no action: 0.0, no step counted.

    ## End
    `terminated` with all boxes on targets (success), else `truncated` after `max_steps` actions.

    ## Reset
    `seed` decides the room. `options={"chance_seed": int}` is accepted as by the other environments, but no
    chance comes after the start.

    ## Arguments
    `size`: (rows, columns), walls included. `search_depth`: moves of the reverse play behind a level.
    `max_solution`: levels whose shortest solution needs more actions are drawn again (None: `max_actions`,
    0: no limit). `symbols`: replacements for entries of SYMBOLS. `room`: explicit rows over the default
    SYMBOLS, used as they are in place of a random level.

    ## Info
    Beside the three usual booleans: `boxes_on_target`, a count.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}
    actions = tuple(MOVES)

    def __init__(
        self,
        size=(6, 6),
        num_boxes=1,
        max_steps=100,
        search_depth=300,
        observation="grid_coord",
        symbols=None,
        max_solution=None,
        max_turns=5,
        max_actions=10,
        room=None,
        render_mode=None,
    ):
        if not isinstance(size, (tuple, list)) or len(size) != 2:
            raise ValueError(f"size must be (rows, columns), got {size!r}; try (6, 6)")
        max_solution = max_actions if max_solution is None else max_solution
        whole_numbers = {
            "rows of size": (size[0], 3), "columns of size": (size[1], 3), "num_boxes": (num_boxes, 1),
            "max_steps": (max_steps, 1), "search_depth": (search_depth, 2), "max_solution": (max_solution, 0),
            "max_turns": (max_turns, 1), "max_actions": (max_actions, 1),
        }  # fmt: skip
        for name, (value, least) in whole_numbers.items():
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}; try {least}")
        if (size[0] - 2) * (size[1] - 2) < num_boxes + 2:
            raise ValueError(
                f"num_boxes {num_boxes} needs {num_boxes + 2} cells inside the walls, size {tuple(size)} has "
                f"{(size[0] - 2) * (size[1] - 2)}; take a larger size or fewer boxes"
            )
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

        self._height, self._width = size
        self._room = None if room is None else self._parse(room)
        self._offsets = [down * self._width + right for down, right in MOVES.values()]
        self._num_boxes, self._max_steps, self._search_depth = num_boxes, max_steps, search_depth
        self._observation, self._max_solution = observation, max_solution
        self.max_turns, self.max_actions, self.render_mode = max_turns, max_actions, render_mode
        self._text, self._over = None, False

        self.instruction = (
            "Push every box onto a target. You push a box by walking into it; you cannot pull. "
            f"The room has {self._height} x {self._width} cells, the outermost are walls."
        )
        if "grid" in observation:
            legend = ", ".join(f"{mark} {kind}" for kind, mark in self._symbols.items())
            self.instruction += f" Symbols: {legend}."
        if "coord" in observation:
            self.instruction += " Cells are (row, column); (0, 0) is top left, Down adds 1 to the row."
        # Sets of characters have no stable order over processes, and spaces sample by position: sorted.
        written = "".join(sorted(set(string.ascii_letters + string.digits + "(), \n" + "".join(marks))))
        self.action_space = gymnasium.spaces.Text(max_length=16, charset=string.ascii_letters)
        length = 64 + 24 * self._height * self._width
        self.observation_space = gymnasium.spaces.Text(max_length=length, charset=written)

    def _parse(self, room):
        """(floor, targets, player, boxes) of explicit rows; sets the size to theirs."""
        kinds = {mark: kind for kind, mark in SYMBOLS.items()}
        room = tuple(room) or ("",)
        width, drawn = len(room[0]), "".join(room)
        cells = {i: kinds.get(mark, "unknown") for i, mark in enumerate(drawn)}
        border = room[0] + room[-1] + "".join(row[:1] + row[-1:] for row in room)
        player = [i for i, kind in cells.items() if kind.startswith("player")]
        boxes = frozenset(i for i, kind in cells.items() if kind.startswith("box"))
        targets = frozenset(i for i, kind in cells.items() if kind.endswith("target"))
        closed = {len(row) for row in room} == {width} and set(border) == {"#"}
        matched = len(player) == 1 and 0 < len(boxes) == len(targets) and boxes != targets
        if not (closed and matched and "unknown" not in cells.values()):
            raise ValueError(
                f"room must be rows of one length over {''.join(SYMBOLS.values())}, closed by walls, with a "
                "player and as many boxes as targets, not all of them there yet, "
                f"got {room!r}; try ('#####', '#PXO#', '#####')"
            )
        self._height, self._width = len(room), width
        return frozenset(i for i, kind in cells.items() if kind != "wall"), targets, player[0], boxes

    def reset(self, *, seed=None, options=None):
        if unknown := set(options or {}) - {"chance_seed"}:
            raise ValueError(f"reset has the option chance_seed only, got {sorted(unknown)}; drop these")
        super().reset(seed=seed)
        self._floor, self._targets, self._player, self._boxes = self._room or self._draw()
        self._steps, self._over, self._text = 0, False, self._describe()
        return self._text, self._info()

    def _draw(self):
        shape = self._height, self._width, self._num_boxes, self._search_depth
        for _ in range(MAX_LEVELS):
            level = draw_level(self.np_random, *shape, self._offsets)
            if level is None:
                continue
            if not self._max_solution:  # a level was made by undoing moves, so redoing them solves it
                return level
            if shortest_solution(*level, self._offsets, self._max_solution) is not None:
                return level
        raise ValueError(
            f"none of {MAX_LEVELS} levels of size {shape[:2]}, num_boxes {self._num_boxes} has a solution "
            f"of at most max_solution {self._max_solution} actions; raise it, or try 0 (no limit)"
        )

    def step(self, action):
        if self._text is None or self._over:
            raise ResetNeeded("step() needs a running episode; call reset() first and after its end")
        name = action.strip().capitalize()
        if name not in MOVES:
            return self._text, 0.0, False, False, self._info(valid=False)
        before, on_target = self._player, len(self._boxes & self._targets)
        offset = self._offsets[self.actions.index(name)]
        self._player, self._boxes = moved(self._floor, self._player, self._boxes, offset)
        self._steps += 1
        terminated = self._boxes == self._targets
        truncated = not terminated and self._steps >= self._max_steps
        self._over, self._text = terminated or truncated, self._describe()
        gained = len(self._boxes & self._targets) - on_target
        reward = -0.1 + gained + (10.0 if terminated else 0.0)
        return self._text, reward, terminated, truncated, self._info(effective=self._player != before)

    def solve(self):
        """Shortest list of actions from here; [] when solved, None when the boxes are stuck.

        None also where the search gave up after MAX_STATES states, which takes three boxes in a large room.
        """
        if self._text is None:
            raise ResetNeeded("solve() needs a state; call reset() first")
        path = shortest_solution(self._floor, self._targets, self._player, self._boxes, self._offsets)
        return None if path is None else [self.actions[move] for move in path]

    def render(self):
        return self._text

    def _info(self, valid=True, effective=False):
        flags = {"success": self._boxes == self._targets, "action_is_valid": valid}
        return flags | {"action_is_effective": effective, "boxes_on_target": len(self._boxes & self._targets)}

    def _describe(self):
        lines = []
        if "grid" in self._observation:
            marks = [self._symbols[self._kind(cell)] for cell in range(self._height * self._width)]
            lines += ["".join(marks[i : i + self._width]) for i in range(0, len(marks), self._width)]
        if self._observation == "coord":
            rows, cols = range(1, self._height - 1), range(1, self._width - 1)
            inside = [r * self._width + c for r in rows for c in cols]
            walls = ", ".join(self._place(cell) for cell in inside if cell not in self._floor)
            lines.append(f"walls {walls or 'none'}")
        if "coord" in self._observation:
            lines.append("targets " + ", ".join(self._place(cell) for cell in sorted(self._targets)))
            boxes = (self._place(cell) + self._suffix(cell) for cell in sorted(self._boxes))
            lines.append("boxes " + ", ".join(boxes))
            lines.append(f"player {self._place(self._player)}{self._suffix(self._player)}")
        return "\n".join(lines)

    def _kind(self, cell):
        if cell == self._player:
            return "player" + self._suffix(cell)
        if cell in self._boxes:
            return "box" + self._suffix(cell)
        if cell in self._targets:
            return "target"
        return "floor" if cell in self._floor else "wall"

    def _suffix(self, cell):
        return " on target" if cell in self._targets else ""

    def _place(self, cell):
        return str(divmod(cell, self._width))
