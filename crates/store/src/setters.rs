//! Setters of builders, whose code would be the same for every option.

/// The setters of fields that take their value as it is: `name: Type`, with the documentation of the setter.
macro_rules! setters {
    ($($(#[$attribute:meta])* $name:ident: $Type:ty,)+) => {$(
        $(#[$attribute])*
        pub const fn $name(mut self, $name: $Type) -> Self {
            self.$name = $name;
            self
        }
    )+};
}

pub(crate) use setters;
