//! Several processes on one file: exact under load, fair to each other, and consistent after any of them is
//! killed.

mod kill;
mod load;
mod suite_under_load;
