//! LabyrinthEscape and LabyrinthExplore: find the goal of a maze, or visit all of it.
//!
//! Grid of S x S, S = 11, 15 or 19. Cells with two odd coordinates are rooms; passages between neighbouring
//! rooms make them a tree, dug by hunt-and-kill. The start lies on the border in front of a room, the goal on
//! the opposite border (Explore has a wall there).
//!
//! - Observation: the 3 x 3 cells around the agent row by row (0 free, 1 wall, 2 start, 3 goal) and the last
//!   action (4 at the start). Windows begin no earlier than row 0 and column 0: on those the agent stands in
//!   the window's first row or column, and what is missing at the far side is filled with walls.
//! - Actions: left, right, up, down; into a wall nothing moves.
//! - Escape: every step costs 1/1024, the goal pays 1 and ends the episode. Explore: a new cell pays
//!   1/(number of free cells), any other step costs 1/1024, the last free cell ends the episode. Both are cut
//!   off at step 1023.

mod player;

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;
use serde::Deserialize;

use super::replay::{choice, episodes, impossible};
use super::task::Difficulty;
use crate::env::Step;
use crate::error::{Error, Result};

pub use player::{LabyrinthEscapePlayer, LabyrinthExplorePlayer};

/// What the agent sees of a cell.
const FREE: u8 = 0;
const WALL: u8 = 1;
const START: u8 = 2;
const GOAL: u8 = 3;
/// The bits of a grid's byte that the agent sees.
const VISIBLE: u8 = 3;
/// A bit: not visited yet, in Explore.
const FRESH: u8 = 4;
/// A bit: a room that is not dug yet.
const SOLID: u8 = 8;

/// The grid lies in rows of this many bytes, with one cell of wall around it.
const STRIDE: usize = 32;
const BYTES: usize = 21 * STRIDE;

const STEPS: u32 = 1023;
const COST: f64 = 1.0 / 1024.0;

/// Offset in the grid's bytes that each action leads to.
const WAYS: [isize; 4] = [-1, 1, -(STRIDE as isize), STRIDE as isize];
/// Shown as the last action at the start of an episode.
const NONE: usize = 4;

/// The hidden state of [`LabyrinthEscape`] and [`LabyrinthExplore`].
#[derive(Debug, Clone, Deserialize)]
pub struct Labyrinth {
    /// Rows of cells: 0 free, 1 wall, 2 start, 3 goal (LabyrinthEscape only).
    pub grid: Vec<Vec<u8>>,
    /// Row and column of the start.
    pub start: [usize; 2],
    /// Row and column of the goal, or of the wall in its place (LabyrinthExplore).
    pub end: [usize; 2],
}

/// Number of rooms along one side.
fn rooms(difficulty: Difficulty) -> usize {
    difficulty.pick([5, 7, 9])
}

/// Place of a cell in the bytes.
fn place([row, column]: [usize; 2]) -> usize {
    (row + 1) * STRIDE + column + 1
}

/// A maze with an agent in it.
#[derive(Debug, Clone)]
struct Maze {
    spaces: Spaces,
    /// S, the cells of a side.
    side: usize,
    /// Places of all rooms.
    rooms: Vec<u16>,
    /// A grid of walls and solid rooms.
    rock: [u8; BYTES],
    grid: [u8; BYTES],
    /// Place of the agent.
    at: usize,
    /// Steps left; none without a running episode.
    left: u32,
}

impl Maze {
    fn new(difficulty: Difficulty) -> Self {
        let side = 2 * rooms(difficulty) + 1;
        let odd = || (1..side).step_by(2);
        let rooms: Vec<u16> = odd().flat_map(|r| odd().map(move |c| place([r, c]) as u16)).collect();
        let mut rock = [WALL; BYTES];
        rooms.iter().for_each(|room| rock[usize::from(*room)] |= SOLID);
        let spaces = Spaces {
            observation: Space::MultiDiscrete { sizes: vec![5; 10] },
            action: Space::Discrete { n: 4 },
        };
        Self { spaces, side, rooms, rock, grid: rock, at: 0, left: 0 }
    }

    /// A new maze with a start and the goal's mark.
    fn draw(&mut self, rng: &mut Rng, goal: u8) {
        self.dig(rng);
        let (way, far) = (rng.below(4), self.side - 1);
        let mut odd = || 2 * rng.below(far as u32 / 2) as usize + 1;
        let (a, b) = (odd(), odd());
        let (start, end) = match way {
            0 => ([0, a], [far, b]),
            1 => ([far, a], [0, b]),
            2 => ([a, 0], [b, far]),
            _ => ([a, far], [b, 0]),
        };
        self.grid[place(end)] = goal;
        self.enter(start);
    }

    fn enter(&mut self, start: [usize; 2]) {
        self.at = place(start);
        self.grid[self.at] = START;
        self.left = STEPS;
    }

    /// Hunt-and-kill: walk from a random room into solid neighbours until there are none, then S^2 times look
    /// at a random room and walk on from it if it is dug. A few mazes in 100,000 keep a solid room.
    fn dig(&mut self, rng: &mut Rng) {
        self.grid = self.rock;
        let count = self.rooms.len() as u32;
        let random = |rng: &mut Rng| usize::from(self.rooms[rng.below(count) as usize]);
        let first = random(rng);
        self.grid[first] = FREE;
        let mut solid = count - 1 - walk(&mut self.grid, first, rng);
        for _ in 0..self.side * self.side {
            if solid == 0 {
                break;
            }
            let room = random(rng);
            if self.grid[room] == FREE {
                solid -= walk(&mut self.grid, room, rng);
            }
        }
    }

    /// Takes a maze over, if it is one; its end must be marked as `goal`.
    fn take(&mut self, hidden: &Labyrinth, goal: u8) -> Result<()> {
        let (side, far) = (self.side, self.side - 1);
        if hidden.grid.len() != side || hidden.grid.iter().any(|row| row.len() != side) {
            return impossible(format!("a grid of {side} x {side}"), format!("{} rows", hidden.grid.len()));
        }
        let ([a, b], [c, d]) = (hidden.start, hidden.end);
        let opposite = |x: usize, y: usize| (x, y) == (0, far) || (x, y) == (far, 0);
        let odd = |x: usize, y: usize| x % 2 == 1 && x < far && y % 2 == 1 && y < far;
        if !(opposite(a, c) && odd(b, d) || opposite(b, d) && odd(a, c)) {
            return impossible(
                "start and end before rooms on opposite sides",
                format!("{:?} and {:?}", hidden.start, hidden.end),
            );
        }
        let mut grid = [WALL; BYTES];
        for (row, cells) in hidden.grid.iter().enumerate() {
            grid[place([row, 0])..][..side].copy_from_slice(cells);
        }
        let marks = [hidden.start, hidden.end].map(|cell| std::mem::replace(&mut grid[place(cell)], WALL));
        let other = grid.iter().find(|cell| ![FREE, WALL].contains(cell));
        if marks != [START, goal] || other.is_some() {
            return impossible(
                format!("{START} at the start, {goal} at the end, elsewhere {FREE} or {WALL}"),
                format!("{} and {}, elsewhere {:?}", marks[0], marks[1], other.unwrap_or(&WALL)),
            );
        }
        // n connected rooms need n - 1 passages: if nothing else is free, they are a tree.
        let (free, rooms) = (grid.iter().filter(|cell| **cell == FREE).count(), reached(&grid, &self.rooms));
        if free + 1 != 2 * rooms {
            return impossible(
                "rooms and passages that make a tree",
                format!("{rooms} connected rooms among {free} free cells"),
            );
        }
        grid[place(hidden.end)] = goal;
        self.grid = grid;
        self.enter(hidden.start);
        Ok(())
    }

    /// Moves the agent by an action, which is returned.
    #[inline]
    fn go(&mut self, action: Values<'_>) -> Result<usize> {
        if self.left == 0 {
            return Err(Error::Finished);
        }
        let way = choice(action, 4, "direction")?;
        let target = self.at.wrapping_add_signed(WAYS[way]);
        if self.grid[target] & VISIBLE != WALL {
            self.at = target;
        }
        self.left -= 1;
        Ok(way)
    }

    /// Writes the observation and says how the step ended.
    #[inline]
    fn arrive(&mut self, way: usize, reward: f64, terminated: bool, observation: ValuesMut<'_>) -> Step {
        self.show(way, observation);
        let truncated = self.left == 0;
        if terminated {
            self.left = 0;
        }
        Step { reward, terminated, truncated, ..Step::default() }
    }

    #[inline]
    fn show(&self, last: usize, observation: ValuesMut<'_>) {
        let seen = observation.ints;
        seen[9] = last as i32;
        let (top, left) = (self.at < 2 * STRIDE, self.at % STRIDE == 1);
        if top || left {
            seen[..9].fill(i32::from(WALL));
            let corner = self.at - if top { 0 } else { STRIDE } - usize::from(!left);
            self.window(corner, 3 - usize::from(top), 3 - usize::from(left), seen);
        } else {
            self.window(self.at - STRIDE - 1, 3, 3, seen);
        }
    }

    #[inline(always)]
    fn window(&self, corner: usize, rows: usize, columns: usize, seen: &mut [i32]) {
        for row in 0..rows {
            let cells = &self.grid[corner + row * STRIDE..][..columns];
            let seen = &mut seen[3 * row..][..columns];
            seen.iter_mut().zip(cells).for_each(|(seen, cell)| *seen = i32::from(cell & VISIBLE));
        }
    }
}

/// Digs from a room on into solid neighbours, each equally likely, until there are none. Returns how many it
/// dug.
fn walk(grid: &mut [u8; BYTES], mut room: usize, rng: &mut Rng) -> u32 {
    let mut dug = 0;
    loop {
        let solid = |way: usize| u32::from(grid[room.wrapping_add_signed(2 * WAYS[way])] & SOLID != 0) << way;
        let mut near = solid(0) | solid(1) | solid(2) | solid(3);
        match near.count_ones() {
            0 => return dug,
            1 => {}
            n => (0..rng.below(n)).for_each(|_| near &= near - 1),
        }
        let way = WAYS[near.trailing_zeros() as usize];
        grid[room.wrapping_add_signed(way)] = FREE;
        room = room.wrapping_add_signed(2 * way);
        grid[room] = FREE;
        dug += 1;
    }
}

/// Number of free rooms that are connected with the first free one.
fn reached(grid: &[u8; BYTES], rooms: &[u16]) -> usize {
    let free = |place: usize| grid[place] == FREE;
    let mut seen = [false; BYTES];
    let mut open: Vec<usize> =
        rooms.iter().map(|room| usize::from(*room)).find(|room| free(*room)).into_iter().collect();
    open.iter().for_each(|room| seen[*room] = true);
    let mut count = 0;
    while let Some(room) = open.pop() {
        count += 1;
        for way in WAYS {
            let next = room.wrapping_add_signed(2 * way);
            if free(room.wrapping_add_signed(way)) && free(next) && !std::mem::replace(&mut seen[next], true)
            {
                open.push(next);
            }
        }
    }
    count
}

/// LabyrinthEscape: find the goal on the other side of a maze.
#[derive(Debug, Clone)]
pub struct LabyrinthEscape(Maze);

impl LabyrinthEscape {
    /// The task of this difficulty: 5 x 5, 7 x 7 or 9 x 9 rooms.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Maze::new(difficulty))
    }

    fn deal(&mut self, rng: &mut Rng) {
        self.0.draw(rng, GOAL);
    }

    fn take(&mut self, hidden: &Labyrinth) -> Result<()> {
        self.0.take(hidden, GOAL)
    }

    fn start(&mut self, observation: ValuesMut<'_>) {
        self.0.show(NONE, observation);
    }

    #[inline]
    fn play(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let way = self.0.go(action)?;
        let goal = self.0.grid[self.0.at] == GOAL;
        Ok(self.0.arrive(way, if goal { 1.0 - COST } else { -COST }, goal, observation))
    }
}

episodes!(LabyrinthEscape, Labyrinth, env => env.0.spaces);

/// LabyrinthExplore: visit every cell of a maze.
#[derive(Debug, Clone)]
pub struct LabyrinthExplore {
    maze: Maze,
    /// Free cells not visited.
    fresh: usize,
    /// What a new cell pays.
    pay: f64,
}

impl LabyrinthExplore {
    /// The task of this difficulty: 5 x 5, 7 x 7 or 9 x 9 rooms.
    pub fn new(difficulty: Difficulty) -> Self {
        Self { maze: Maze::new(difficulty), fresh: 0, pay: 0.0 }
    }

    fn deal(&mut self, rng: &mut Rng) {
        self.maze.draw(rng, WALL);
    }

    fn take(&mut self, hidden: &Labyrinth) -> Result<()> {
        self.maze.take(hidden, WALL)
    }

    fn start(&mut self, observation: ValuesMut<'_>) {
        self.fresh = 0;
        for cell in self.maze.grid.iter_mut().filter(|cell| **cell == FREE) {
            *cell |= FRESH;
            self.fresh += 1;
        }
        self.pay = 1.0 / self.fresh as f64;
        self.maze.show(NONE, observation);
    }

    #[inline]
    fn play(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let way = self.maze.go(action)?;
        let cell = &mut self.maze.grid[self.maze.at];
        let fresh = *cell & FRESH != 0;
        *cell &= !FRESH;
        self.fresh -= usize::from(fresh);
        Ok(self.maze.arrive(way, if fresh { self.pay } else { -COST }, self.fresh == 0, observation))
    }
}

episodes!(LabyrinthExplore, Labyrinth, env => env.maze.spaces);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::{Env, Player};
    use crate::popgym::Replay;
    use crate::popgym::trace::tests::{check_family, mean_return};

    fn room(seen: &mut [i32]) -> ValuesMut<'_> {
        ValuesMut::ints(seen)
    }

    fn step(env: &mut impl Env, way: usize, seen: &mut [i32]) -> Result<Step> {
        env.step(Values::ints(&[way as i32]), room(seen))
    }

    /// 5 x 5 rooms in one snake, from the start over the first row to the goal under the last.
    fn snake() -> Labyrinth {
        let mut grid = vec![vec![WALL; 11]; 11];
        for row in (1..10).step_by(2) {
            grid[row][1..10].fill(FREE);
        }
        for (row, column) in [(2, 9), (4, 1), (6, 9), (8, 1)] {
            grid[row][column] = FREE;
        }
        (grid[0][1], grid[10][9]) = (START, GOAL);
        Labyrinth { grid, start: [0, 1], end: [10, 9] }
    }

    /// The way from start to goal of [`snake`].
    fn way_out() -> Vec<usize> {
        let row = |way: usize| [vec![way; 8], vec![3; 2]].concat();
        let mut ways = [vec![3], row(1), row(0), row(1), row(0), row(1)].concat();
        ways.pop();
        ways
    }

    /// Steps from `from` to every cell, by place.
    fn distances(grid: &[u8; BYTES], from: usize) -> Vec<Option<usize>> {
        let mut steps = vec![None; BYTES];
        steps[from] = Some(0);
        let mut open = std::collections::VecDeque::from([from]);
        while let Some(at) = open.pop_front() {
            for next in WAYS.map(|way| at.wrapping_add_signed(way)) {
                if grid[next] & VISIBLE != WALL && steps[next].is_none() {
                    steps[next] = steps[at].map(|n| n + 1);
                    open.push_back(next);
                }
            }
        }
        steps
    }

    #[test]
    fn traces_replay() {
        check_family("LabyrinthEscape", LabyrinthEscape::new);
        check_family("LabyrinthExplore", LabyrinthExplore::new);
    }

    #[test]
    fn the_goal_pays_once_and_ends_the_episode() {
        let (mut env, mut seen) = (LabyrinthEscape::new(Difficulty::Easy), [0; 10]);
        env.begin(&snake(), room(&mut seen)).unwrap();
        assert_eq!(seen, [1, 2, 1, 1, 0, 0, 1, 1, 1, 4]);
        let ways = way_out();
        for (i, way) in ways.iter().enumerate() {
            let last = i + 1 == ways.len();
            let expected = if last { 1.0 - COST } else { -COST };
            let result = step(&mut env, *way, &mut seen).unwrap();
            assert_eq!(result, Step { reward: expected, terminated: last, ..Step::default() });
        }
        assert_eq!(seen, [0, 0, 1, 1, 3, 1, 1, 1, 1, 3]);
        assert!(matches!(step(&mut env, 0, &mut seen), Err(Error::Finished)));
    }

    #[test]
    fn step_1023_is_the_last_even_at_the_goal() {
        let (mut env, mut seen) = (LabyrinthEscape::new(Difficulty::Easy), [0; 10]);
        let ways = way_out();
        for (waste, terminated) in [(1023 - ways.len(), true), (1024 - ways.len(), false)] {
            env.begin(&snake(), room(&mut seen)).unwrap();
            // Up, out of the grid: a wall as well.
            let mut all = vec![2; waste];
            all.extend(&ways);
            for way in &all[..1022] {
                let result = step(&mut env, *way, &mut seen).unwrap();
                assert_eq!(result, Step { reward: -COST, ..Step::default() });
            }
            let result = step(&mut env, all[1022], &mut seen).unwrap();
            assert_eq!((result.terminated, result.truncated), (terminated, true));
            assert!(matches!(step(&mut env, 0, &mut seen), Err(Error::Finished)));
        }
    }

    #[test]
    fn exploring_pays_new_cells_and_ends_with_the_last() {
        let (mut env, mut seen) = (LabyrinthExplore::new(Difficulty::Easy), [0; 10]);
        let mut hidden = snake();
        hidden.grid[10][9] = WALL;
        env.begin(&hidden, room(&mut seen)).unwrap();
        let bump = step(&mut env, 0, &mut seen).unwrap();
        assert_eq!(bump, Step { reward: -COST, ..Step::default() });
        let mut ways = way_out();
        ways.pop();
        ways.splice(1..1, [2, 3]);
        for (i, way) in ways.iter().enumerate() {
            let reward = if [1, 2].contains(&i) { -COST } else { 1.0 / 49.0 };
            let result = step(&mut env, *way, &mut seen).unwrap();
            assert_eq!(result, Step { reward, terminated: i + 1 == ways.len(), ..Step::default() }, "{i}");
        }
        assert!(matches!(step(&mut env, 0, &mut seen), Err(Error::Finished)));
    }

    #[test]
    fn misuse_is_an_error() {
        let (mut env, mut seen) = (LabyrinthEscape::new(Difficulty::Easy), [0; 10]);
        assert!(matches!(step(&mut env, 0, &mut seen), Err(Error::Finished)));
        env.reset(0, room(&mut seen)).unwrap();
        for bad in [&[4][..], &[-1], &[], &[0, 0]] {
            let result = env.step(Values::ints(bad), room(&mut seen));
            assert!(matches!(result, Err(Error::Base(elmur_base::Error::Space { .. }))), "{bad:?}");
        }
        let mut other = LabyrinthExplore::new(Difficulty::Easy);
        assert!(matches!(step(&mut other, 0, &mut seen), Err(Error::Finished)));
    }

    #[test]
    fn only_mazes_are_taken() {
        let (mut env, mut seen) = (LabyrinthEscape::new(Difficulty::Easy), [0; 10]);
        let mut refused = |change: &dyn Fn(&mut Labyrinth)| {
            let mut hidden = snake();
            change(&mut hidden);
            let result = env.begin(&hidden, room(&mut seen));
            assert!(matches!(result, Err(Error::Config { .. })), "{hidden:?}");
        };
        refused(&|h| h.grid.truncate(10));
        refused(&|h| h.grid[4].truncate(3));
        refused(&|h| h.grid[4][4] = FREE); // a pillar
        refused(&|h| h.grid[2][1] = FREE); // a loop
        refused(&|h| h.grid[1][4] = WALL); // two parts
        refused(&|h| (h.grid[1][4], h.grid[4][3]) = (WALL, FREE)); // a loop and two parts
        refused(&|h| h.grid[1][5] = WALL); // passages into rock
        refused(&|h| h.grid[0][5] = FREE);
        refused(&|h| h.grid[5][5] = 7);
        refused(&|h| h.grid[4][4] = 7);
        refused(&|h| h.grid[0][5] = GOAL);
        refused(&|h| h.grid[5][5] = GOAL);
        refused(&|h| h.grid[5][5] = START);
        refused(&|h| h.grid[0][1] = WALL);
        refused(&|h| h.grid[10][9] = WALL); // Explore's maze
        refused(&|h| h.start = [0, 3]);
        refused(&|h| h.end = [9, 10]);
        refused(&|h| h.end = [10, usize::MAX]);
        refused(&|h| h.start = [0, 11]);
        refused(&|h| (h.start, h.grid[0][1], h.grid[0][2]) = ([0, 2], WALL, START));
        assert!(LabyrinthExplore::new(Difficulty::Easy).begin(&snake(), room(&mut seen)).is_err());
        assert!(LabyrinthEscape::new(Difficulty::Hard).begin(&snake(), room(&mut seen)).is_err());
        // Nothing begun, nothing to step.
        assert!(matches!(step(&mut env, 0, &mut seen), Err(Error::Finished)));
    }

    #[test]
    fn a_seed_is_an_episode() {
        for difficulty in Difficulty::ALL {
            let (mut one, mut other) = (Maze::new(difficulty), Maze::new(difficulty));
            one.draw(&mut Rng::new(7, 0), GOAL);
            let grid = one.grid;
            other.draw(&mut Rng::new(8, 0), GOAL);
            assert_ne!(grid, other.grid);
            other.draw(&mut Rng::new(7, 0), GOAL);
            assert_eq!((one.at, grid), (other.at, other.grid));
        }
    }

    /// All rooms dug and connected by as few passages as possible. Longest ways and ways to the goal are on
    /// average those of the package's mazes (from returns of players who know the maze, rounded to half a
    /// step).
    #[test]
    fn mazes_are_trees_as_deep_as_the_packages() {
        // Tolerances: four standard errors and the rounding.
        for (difficulty, goal, longest, tolerance) in [
            (Difficulty::Easy, 21.5, 30.6, 1.2),
            (Difficulty::Medium, 35.8, 53.0, 1.8),
            (Difficulty::Hard, 52.2, 78.1, 2.4),
        ] {
            let mut maze = Maze::new(difficulty);
            let (mut to_goal, mut deepest, rounds) = (0, 0, 1500);
            for seed in 0..rounds {
                maze.draw(&mut Rng::new(seed, 0), GOAL);
                let n = maze.rooms.len();
                let count = |kind: u8| maze.grid.iter().filter(|cell| **cell == kind).count();
                assert_eq!((count(FREE), count(START), count(GOAL)), (2 * n - 1, 1, 1), "seed {seed}");
                assert_eq!(reached(&maze.grid, &maze.rooms), n, "seed {seed}");
                let steps = distances(&maze.grid, maze.at);
                let goal = maze.grid.iter().position(|cell| *cell == GOAL).unwrap();
                to_goal += steps[goal].unwrap();
                let free = (0..BYTES).filter(|place| maze.grid[*place] == FREE);
                deepest += free.filter_map(|place| steps[place]).max().unwrap();
            }
            let (to_goal, deepest) = (to_goal as f64 / rounds as f64, deepest as f64 / rounds as f64);
            assert!((to_goal - goal).abs() < tolerance, "{difficulty:?}: {to_goal}");
            assert!((deepest - longest).abs() < tolerance, "{difficulty:?}: {deepest}");
        }
    }

    /// Chi-square of the start's side and of both coordinates, and of the pair of coordinates.
    #[test]
    fn starts_and_goals_are_uniform_on_opposite_sides() {
        let (mut maze, rounds) = (Maze::new(Difficulty::Easy), 10_000);
        let mut counts = [[[0u32; 5]; 5]; 4];
        for seed in 0..rounds {
            maze.draw(&mut Rng::new(seed, 0), GOAL);
            let at = |place: usize| [place / STRIDE - 1, place % STRIDE - 1];
            let goal = maze.grid.iter().position(|cell| *cell == GOAL).unwrap();
            let ([a, b], [c, d]) = (at(maze.at), at(goal));
            let (side, x, y) = match ((a, c), (b, d)) {
                ((0, 10), _) => (0, b, d),
                ((10, 0), _) => (1, b, d),
                (_, (0, 10)) => (2, a, c),
                (_, (10, 0)) => (3, a, c),
                other => panic!("{other:?}"),
            };
            assert!(x % 2 == 1 && y % 2 == 1);
            counts[side][x / 2][y / 2] += 1;
        }
        let expected = rounds as f64 / 100.0;
        let chi: f64 =
            counts.as_flattened().as_flattened().iter().map(|n| (f64::from(*n) - expected).powi(2)).sum();
        // 99 degrees of freedom: passed once in 1,000.
        assert!(chi / expected < 149.0, "{chi}");
        let chi = |n: [u32; 4]| n.map(|n| (f64::from(n) - 2500.0).powi(2) / 2500.0).iter().sum::<f64>();
        assert!(chi(counts.map(|side| side.as_flattened().iter().sum())) < 16.3);
    }

    /// A wall is open as often as its seven images under turns and reflections, and all together as often as
    /// trees ask.
    #[test]
    fn walls_have_no_preferred_direction() {
        let (mut maze, rounds) = (Maze::new(Difficulty::Easy), 6000);
        let mut open = [[0u32; 11]; 11];
        for seed in 0..rounds {
            maze.dig(&mut Rng::new(seed, 0));
            for (row, open) in open.iter_mut().enumerate() {
                for (column, open) in open.iter_mut().enumerate() {
                    *open += u32::from(maze.grid[place([row, column])] == FREE);
                }
            }
        }
        let rate = |row: usize, column: usize| f64::from(open[row][column]) / rounds as f64;
        let mut sum = 0.0;
        for row in 1..10 {
            for column in (1..10).filter(|column| (row + column) % 2 == 1) {
                let (r, c) = (10 - row, 10 - column);
                let images = [
                    (row, column),
                    (row, c),
                    (r, column),
                    (r, c),
                    (column, row),
                    (column, r),
                    (c, row),
                    (c, r),
                ];
                let mean = images.map(|(row, column)| rate(row, column)).iter().sum::<f64>() / 8.0;
                let error = (mean * (1.0 - mean) / rounds as f64).sqrt();
                assert!(
                    (rate(row, column) - mean).abs() < 4.0 * error,
                    "{row} {column}: {} {mean}",
                    rate(row, column)
                );
                sum += rate(row, column);
            }
        }
        assert!((sum - 24.0).abs() < 0.01, "{sum}");
        assert_eq!(open[4][4] + open[0][3] + open[3][10], 0);
    }

    #[test]
    fn players_find_the_goal_and_every_cell() {
        // From 10,000 episodes each.
        for (difficulty, escape, explore) in [
            (Difficulty::Easy, 0.967, 0.9707),
            (Difficulty::Medium, 0.938, 0.9311),
            (Difficulty::Hard, 0.8988, 0.8737),
        ] {
            let mut player = LabyrinthEscapePlayer::new(difficulty);
            let (mean, error) = mean_return(&mut LabyrinthEscape::new(difficulty), &mut player, 0..2000);
            assert!((mean - escape).abs() < 4.0 * error && error < 0.002, "{difficulty:?}: {mean} {error}");
            let mut player = LabyrinthExplorePlayer::new(difficulty);
            let (mean, error) = mean_return(&mut LabyrinthExplore::new(difficulty), &mut player, 0..500);
            assert!((mean - explore).abs() < 4.0 * error && error < 0.0015, "{difficulty:?}: {mean} {error}");
        }
    }

    /// Rock before the start, and rock before the goal.
    #[test]
    fn players_keep_acting_where_there_is_no_way() {
        let (mut env, mut seen, mut action) = (LabyrinthEscape::new(Difficulty::Easy), [0; 10], [0]);
        let mut player = LabyrinthEscapePlayer::new(Difficulty::Easy);
        let close = |cells: [[usize; 2]; 2]| {
            let mut hidden = snake();
            cells.iter().for_each(|[row, column]| hidden.grid[*row][*column] = WALL);
            hidden
        };
        for hidden in [close([[1, 1], [1, 2]]), close([[9, 9], [9, 8]])] {
            // On each of the four sides.
            for turn in 0..4 {
                let turned = |[row, column]: [usize; 2]| match turn {
                    0 => [row, column],
                    1 => [10 - row, column],
                    2 => [column, row],
                    _ => [column, 10 - row],
                };
                let mut grid = vec![vec![WALL; 11]; 11];
                for (row, cells) in hidden.grid.iter().enumerate() {
                    for (column, cell) in cells.iter().enumerate() {
                        let [row, column] = turned([row, column]);
                        grid[row][column] = *cell;
                    }
                }
                let hidden = Labyrinth { grid, start: turned(hidden.start), end: turned(hidden.end) };
                env.begin(&hidden, room(&mut seen)).unwrap();
                player.reset();
                for t in 1..=1023 {
                    player.act(Values::ints(&seen), room(&mut action));
                    let result = step(&mut env, action[0] as usize, &mut seen).unwrap();
                    assert_eq!(result, Step { reward: -COST, truncated: t == 1023, ..Step::default() });
                }
            }
        }
    }

    #[test]
    fn players_survive_nonsense() {
        let mut rng = Rng::new(3, 0);
        for difficulty in Difficulty::ALL {
            let mut escape = LabyrinthEscapePlayer::new(difficulty);
            let mut explore = LabyrinthExplorePlayer::new(difficulty);
            for episode in 0..60 {
                escape.reset();
                explore.reset();
                for _ in 0..300 {
                    // Mostly free cells in every third episode, so that walks go on.
                    let odds = [4, 8, 50][episode % 3];
                    let seen: Vec<i32> =
                        (0..10).map(|_| (rng.below(odds) as i32 - 1) % 4).map(|x| x.max(0)).collect();
                    let mut action = [9];
                    escape.act(Values::ints(&seen), room(&mut action));
                    assert!((0..4).contains(&action[0]));
                    explore.act(Values::ints(&seen[..rng.below(11) as usize]), room(&mut action));
                    assert!((0..4).contains(&action[0]));
                }
            }
        }
    }
}
