//! LabyrinthEscape and LabyrinthExplore: find the goal of a maze, or visit all of it.
//!
//! Grid of S x S, S = 11, 15 or 19. Cells with two odd coordinates are rooms; passages between neighbouring rooms make them a tree,
//! dug by hunt-and-kill. The start lies on the border in front of a room, the goal on the opposite border (Explore has a wall there).
//!
//! - Observation: the 3 x 3 cells around the agent row by row (0 free, 1 wall, 2 start, 3 goal) and the last action (4 at the start).
//!   Windows begin no earlier than row 0 and column 0: on those the agent stands in the window's first row or column, and
//!   what is missing at the far side is filled with walls.
//! - Actions: left, right, up, down; into a wall nothing moves.
//! - Escape: every step costs 1/1024, the goal pays 1 and ends the episode. Explore: a new cell pays 1/(number of free cells), any
//!   other step costs 1/1024, the last free cell ends the episode. Both are cut off at step 1023.

use elmur_rng::Rng;
use serde::Deserialize;

use super::replay::{Replay, choice, impossible};
use super::task::Difficulty;
use crate::env::{Env, Step};
use crate::error::{Error, Result};
use crate::space::{Space, Spaces, Values, ValuesMut};

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

/// Where the actions lead.
const WAYS: [isize; 4] = [-1, 1, -(STRIDE as isize), STRIDE as isize];
/// The last action before there was one.
const NONE: usize = 4;

/// The hidden state.
#[derive(Debug, Clone, Deserialize)]
pub struct Labyrinth {
    /// Rows of cells: 0 free, 1 wall, 2 start, 3 goal (LabyrinthEscape only).
    pub grid: Vec<Vec<u8>>,
    /// Row and column of the start.
    pub start: [usize; 2],
    /// Row and column of the goal, or of where it would be.
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
    /// S.
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
    fn draw(&mut self, seed: u64, goal: u8) {
        let mut rng = Rng::new(seed, 0);
        self.dig(&mut rng);
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

    /// Hunt-and-kill: walk from a random room into solid neighbours until there are none, then S^2 times look at a random room
    /// and walk on from it if it is dug. A few mazes in 100,000 keep a solid room.
    fn dig(&mut self, rng: &mut Rng) {
        self.grid = self.rock;
        let count = self.rooms.len() as u32;
        let mut random = |rng: &mut Rng| usize::from(self.rooms[rng.below(count) as usize]);
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

    /// Takes a maze over if [`Labyrinth`] describes one; the end is marked as `goal`.
    fn take(&mut self, hidden: &Labyrinth, goal: u8) -> Result<()> {
        let side = self.side;
        let squares = hidden.grid.len() == side && hidden.grid.iter().all(|row| row.len() == side);
        if !squares {
            return impossible(format!("a grid of {side} x {side}"), format!("{} rows", hidden.grid.len()));
        }
        let ([a, b], [c, d]) = (hidden.start, hidden.end);
        let far = side - 1;
        let opposite = |p: usize, q: usize, x: usize, y: usize| {
            (p, q) == (0, far) && x % 2 == 1 && y % 2 == 1 && x < far && y < far
        };
        if ![(a, c, b, d), (c, a, b, d), (b, d, a, c), (d, b, a, c)].iter().any(|(p, q, x, y)| opposite(*p, *q, *x, *y)) {
            return impossible(
                "start and end before rooms on opposite sides",
                format!("{:?} and {:?}", hidden.start, hidden.end),
            );
        }
        let cell = |row: usize, column: usize| hidden.grid[row][column];
        let (mut dug, mut passages) = (0, 0);
        for row in 0..side {
            for column in 0..side {
                let here = [row, column];
                let inside = row > 0 && row < far && column > 0 && column < far;
                let legal = match cell(row, column) {
                    WALL => here != hidden.start && (here != hidden.end || goal == WALL),
                    START => here == hidden.start,
                    GOAL => here == hidden.end && goal == GOAL,
                    FREE if !inside => false,
                    FREE => match (row % 2, column % 2) {
                        (1, 1) => {
                            dug += 1;
                            true
                        }
                        (1, 0) => {
                            passages += 1;
                            cell(row, column - 1) == FREE && cell(row, column + 1) == FREE
                        }
                        (0, 1) => {
                            passages += 1;
                            cell(row - 1, column) == FREE && cell(row + 1, column) == FREE
                        }
                        _ => false,
                    },
                    _ => false,
                };
                if !legal {
                    return impossible("a cell of a maze", format!("{} at {here:?}", cell(row, column)));
                }
            }
        }
        // As many passages as a tree has, and all connected: a tree.
        let mut grid = [WALL; BYTES];
        let cells = hidden.grid.iter().enumerate();
        cells.for_each(|(row, cells)| grid[place([row, 0])..][..side].copy_from_slice(cells));
        if passages + 1 != dug || reached(&grid, &self.rooms) != dug {
            return impossible("rooms and passages that make a tree", format!("{dug} and {passages}"));
        }
        self.grid = grid;
        self.enter(hidden.start);
        Ok(())
    }

    /// One step: where it led is in `self.at`. Returns the action.
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
        Step { reward, terminated, truncated }
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

/// Digs from a room on into solid neighbours, each equally likely, until there are none. Returns how many it dug.
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
    let mut open: Vec<usize> = rooms.iter().map(|room| usize::from(*room)).find(|room| free(*room)).into_iter().collect();
    open.iter().for_each(|room| seen[*room] = true);
    let mut count = 0;
    while let Some(room) = open.pop() {
        count += 1;
        for way in WAYS {
            let next = room.wrapping_add_signed(2 * way);
            if free(room.wrapping_add_signed(way)) && free(next) && !std::mem::replace(&mut seen[next], true) {
                open.push(next);
            }
        }
    }
    count
}

/// Find the goal on the other side.
#[derive(Debug, Clone)]
pub struct LabyrinthEscape(Maze);

impl LabyrinthEscape {
    /// The task of this difficulty: 5 x 5, 7 x 7 or 9 x 9 rooms.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Maze::new(difficulty))
    }
}

impl Env for LabyrinthEscape {
    fn spaces(&self) -> &Spaces {
        &self.0.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) {
        self.0.draw(seed, GOAL);
        self.0.show(NONE, observation);
    }

    #[inline]
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        self.advance(action, (), observation)
    }
}

impl Replay for LabyrinthEscape {
    type Hidden = Labyrinth;
    type Draw = ();

    fn begin(&mut self, hidden: &Labyrinth, observation: ValuesMut<'_>) -> Result<()> {
        self.0.take(hidden, GOAL)?;
        self.0.show(NONE, observation);
        Ok(())
    }

    #[inline]
    fn advance(&mut self, action: Values<'_>, (): (), observation: ValuesMut<'_>) -> Result<Step> {
        let way = self.0.go(action)?;
        let goal = self.0.grid[self.0.at] == GOAL;
        Ok(self.0.arrive(way, if goal { 1.0 - COST } else { -COST }, goal, observation))
    }
}

/// Visit every cell.
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

    fn first(&mut self, observation: ValuesMut<'_>) {
        self.fresh = 0;
        for cell in self.maze.grid.iter_mut().filter(|cell| **cell == FREE) {
            *cell |= FRESH;
            self.fresh += 1;
        }
        self.pay = 1.0 / self.fresh as f64;
        self.maze.show(NONE, observation);
    }
}

impl Env for LabyrinthExplore {
    fn spaces(&self) -> &Spaces {
        &self.maze.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) {
        self.maze.draw(seed, WALL);
        self.first(observation);
    }

    #[inline]
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        self.advance(action, (), observation)
    }
}

impl Replay for LabyrinthExplore {
    type Hidden = Labyrinth;
    type Draw = ();

    fn begin(&mut self, hidden: &Labyrinth, observation: ValuesMut<'_>) -> Result<()> {
        self.maze.take(hidden, WALL)?;
        self.first(observation);
        Ok(())
    }

    #[inline]
    fn advance(&mut self, action: Values<'_>, (): (), observation: ValuesMut<'_>) -> Result<Step> {
        let way = self.maze.go(action)?;
        let cell = &mut self.maze.grid[self.maze.at];
        let fresh = *cell & FRESH != 0;
        *cell &= !FRESH;
        self.fresh -= usize::from(fresh);
        Ok(self.maze.arrive(way, if fresh { self.pay } else { -COST }, self.fresh == 0, observation))
    }
}
