//! Several processes on one file: exact under load, fair to each other, and whole after any of them is killed.

mod beside;
mod kill;
mod load;
