//! Players of both labyrinths. They draw a map of rooms while they walk, and decide in rooms only.
//!
//! The map's rows count from the start's side, its columns from the start: where along its side the start
//! lies is not shown, so the maze may reach further to either side until as many columns as it has are known.
//! A *door* is a room not visited yet next to one that is, with an open passage between.

use elmur_base::{Values, ValuesMut};

use super::{FREE, GOAL, START, rooms};
use crate::env::Player;
use crate::popgym::Difficulty;

/// The map has a border of one room; the start's column is in the middle.
const WIDTH: usize = 19;
const ROOMS: usize = 11 * WIDTH;
const FIRST: usize = WIDTH + WIDTH / 2;

/// Directions on the map: towards the start's side, away from it, and to both hands.
const STEPS: [isize; 4] = [-(WIDTH as isize), WIDTH as isize, -1, 1];
const FORWARD: usize = 1;
/// Where a window shows the cell that an action leads to.
const LOOK: [usize; 4] = [3, 5, 1, 7];
/// A distance that stands for no way.
const FAR: u8 = u8::MAX;

#[derive(Debug, Clone, Copy)]
struct Door {
    room: u8,
    /// Passages to go through.
    distance: u8,
    /// Direction of the first one.
    way: u8,
}

/// What a walker knows.
#[derive(Debug, Clone)]
struct Map {
    /// Rooms along a side of the maze.
    size: usize,
    /// Actions of the four directions.
    actions: [usize; 4],
    /// Whether the first observation has come.
    begun: bool,
    /// The action to repeat when there is nothing left to decide.
    settled: Option<usize>,
    room: usize,
    /// The direction of a move of which only half is done.
    half: Option<usize>,
    visited: [bool; ROOMS],
    /// One bit per direction with a passage, of visited rooms.
    open: [u8; ROOMS],
    /// The outermost columns known to be in the maze.
    columns: (usize, usize),
    /// Nearest first.
    doors: Vec<Door>,
}

impl Map {
    fn new(difficulty: Difficulty) -> Self {
        Self {
            size: rooms(difficulty),
            actions: [0; 4],
            begun: false,
            settled: None,
            room: FIRST,
            half: None,
            visited: [false; ROOMS],
            open: [0; ROOMS],
            columns: (FIRST % WIDTH, FIRST % WIDTH),
            doors: Vec::with_capacity(ROOMS),
        }
    }

    fn reset(&mut self) {
        let first = FIRST % WIDTH;
        (self.begun, self.settled, self.half) = (false, None, None);
        (self.room, self.columns) = (FIRST, (first, first));
        (self.visited, self.open) = ([false; ROOMS], [0; ROOMS]);
    }

    /// Whether the maze may have this room.
    fn holds(&self, room: usize) -> bool {
        let (least, most) = self.columns;
        let column = room % WIDTH;
        (1..=self.size).contains(&(room / WIDTH)) && column + self.size > most && column < least + self.size
    }

    /// Takes an observation in. The action, unless there is something to decide: then `self.doors` holds at
    /// least one door.
    fn look(&mut self, observation: &[i32]) -> Option<usize> {
        let sees = |i: usize, cell: u8| observation.get(i).is_some_and(|seen| *seen == i32::from(cell));
        if let Some(action) = self.settled {
            return Some(action);
        }
        if !self.begun {
            self.begun = true;
            // On row 0 and column 0 the window begins with the start, elsewhere the start is in its middle.
            let [left, right, up, down] = [0, 1, 2, 3];
            self.actions = if sees(1, START) {
                [up, down, left, right]
            } else if sees(3, START) {
                [left, right, up, down]
            } else if sees(1, FREE) {
                [down, up, left, right]
            } else {
                [right, left, up, down]
            };
            return Some(self.actions[FORWARD]);
        }
        if let Some(way) = self.half.take() {
            self.room = self.room.wrapping_add_signed(STEPS[way]);
            return Some(self.actions[way]);
        }
        self.visited[self.room] = true;
        for (way, action) in self.actions.into_iter().enumerate() {
            let next = self.room.wrapping_add_signed(STEPS[way]);
            if sees(LOOK[action], GOAL) {
                self.settled = Some(action);
                return Some(action);
            }
            if sees(LOOK[action], FREE) && self.holds(next) {
                self.open[self.room] |= 1 << way;
                let (least, most) = self.columns;
                self.columns = (least.min(next % WIDTH), most.max(next % WIDTH));
            }
        }
        self.find_doors();
        if self.doors.is_empty() {
            self.settled = Some(self.actions[FORWARD]);
        }
        self.settled
    }

    /// The action that begins the move to the next room.
    fn go(&mut self, way: u8) -> usize {
        let way = usize::from(way) % 4;
        self.half = Some(way);
        self.actions[way]
    }

    fn find_doors(&mut self) {
        self.doors.clear();
        let mut seen = [false; ROOMS];
        let mut queue = [Door { room: self.room as u8, distance: 0, way: 0 }; ROOMS];
        let (mut head, mut tail) = (0, 1);
        seen[self.room] = true;
        while head < tail {
            let here = queue[head];
            head += 1;
            let room = usize::from(here.room);
            if !self.visited[room] {
                self.doors.push(here);
                continue;
            }
            for way in (0..4).filter(|way| self.open[room] >> way & 1 == 1) {
                let next = room.wrapping_add_signed(STEPS[way]);
                if !std::mem::replace(&mut seen[next], true) {
                    let way = if here.distance == 0 { way as u8 } else { here.way };
                    queue[tail] = Door { room: next as u8, distance: here.distance + 1, way };
                    tail += 1;
                }
            }
        }
    }

    /// Fewest passages to every unvisited room from the nearest of the given ones, if all walls not seen were
    /// open.
    fn flood(&self, from: impl Iterator<Item = usize>) -> [u8; ROOMS] {
        let mut distances = [FAR; ROOMS];
        let mut queue = [0u8; ROOMS];
        let (mut head, mut tail) = (0, 0);
        for room in from.filter(|room| self.holds(*room) && !self.visited[*room]) {
            if distances[room] == FAR {
                (distances[room], queue[tail]) = (0, room as u8);
                tail += 1;
            }
        }
        while head < tail {
            let room = usize::from(queue[head]);
            head += 1;
            for step in STEPS {
                let next = room.wrapping_add_signed(step);
                if distances[next] == FAR && self.holds(next) && !self.visited[next] {
                    (distances[next], queue[tail]) = (distances[room] + 1, next as u8);
                    tail += 1;
                }
            }
        }
        distances
    }
}

/// A player that goes through the door with the shortest possible path to the goal, steps over unknown ground
/// counting one and a half: as the goal lies on the far side, before a room not visited yet, doors behind
/// which no such room can be reached are left alone.
#[derive(Debug, Clone)]
pub struct LabyrinthEscapePlayer(Map);

impl LabyrinthEscapePlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Map::new(difficulty))
    }
}

impl Player for LabyrinthEscapePlayer {
    fn reset(&mut self) {
        self.0.reset();
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let map = &mut self.0;
        let decided = map.look(observation.ints);
        action.ints[0] = decided.unwrap_or_else(|| {
            let hope = map.flood((0..WIDTH).map(|column| map.size * WIDTH + column));
            let cost = |door: &Door| match hope[usize::from(door.room)] {
                FAR => u32::MAX,
                distance => 2 * u32::from(door.distance) + 3 * u32::from(distance),
            };
            let way = map.doors.iter().min_by_key(|door| cost(door)).map_or(0, |door| door.way);
            map.go(way)
        }) as i32;
    }
}

/// A player that visits room after room. As all but the path to the last room is walked twice, that path
/// should be long: of all doors, the one that promises the longest is left for last, and of the others the
/// nearest comes first that does not lie the same way.
#[derive(Debug, Clone)]
pub struct LabyrinthExplorePlayer(Map);

impl LabyrinthExplorePlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Map::new(difficulty))
    }
}

impl Player for LabyrinthExplorePlayer {
    fn reset(&mut self) {
        self.0.reset();
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let map = &mut self.0;
        let decided = map.look(observation.ints);
        action.ints[0] = decided.unwrap_or_else(|| {
            let way = next_way(map);
            map.go(way)
        }) as i32;
    }
}

/// Depth behind a door is guessed as half the rooms of the unknown ground there, shared among the doors that
/// lead to it; guesses from sampled mazes did no better.
fn next_way(map: &Map) -> u8 {
    let (mut longest, mut last) = (f64::NEG_INFINITY, 0);
    if map.doors.len() > 1 {
        for door in &map.doors {
            let ground = map.flood(std::iter::once(usize::from(door.room)));
            let size = ground.iter().filter(|distance| **distance != FAR).count();
            let sharing = map.doors.iter().filter(|other| ground[usize::from(other.room)] != FAR).count();
            let promise = f64::from(door.distance) + 0.5 * size as f64 / sharing.max(1) as f64;
            if promise > longest {
                (longest, last) = (promise, door.way);
            }
        }
    }
    let first = map.doors.iter().find(|door| door.way != last).or(map.doors.first());
    first.map_or(0, |door| door.way)
}
