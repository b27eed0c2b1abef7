//! Estimates how many bytes a request will send before it is serialized, for layered dispatch.

use tidegate_core::cost::Cost;

/// Assumed bytes per token of text.
const BYTES_PER_TOKEN: u64 = 10;

/// Estimates its size on the wire.
///
/// ```
/// use tidegate::{EstimateBytes, Part};
///
/// let prompt = [Part::Text { tokens: 120 }, Part::Image { bytes: 40_000 }];
/// assert_eq!(prompt.estimated_bytes(), 41_200);
/// ```
pub trait EstimateBytes {
    /// The approximate number of bytes.
    fn estimated_bytes(&self) -> u64;

    /// The cost of one request that sends this value.
    fn to_cost(&self) -> Cost {
        Cost::request().bytes(self.estimated_bytes())
    }
}

/// A part of a model's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part<'a> {
    /// Text, measured in tokens.
    Text {
        /// The number of tokens.
        tokens: u64,
    },
    /// An image, sent unencoded.
    Image {
        /// Its size.
        bytes: u64,
    },
    /// A reference to external content.
    Pointer {
        /// The location, such as a URL.
        location: &'a str,
    },
    /// Anything else; it counts as zero bytes.
    Unknown,
}

impl EstimateBytes for Part<'_> {
    fn estimated_bytes(&self) -> u64 {
        match self {
            Self::Text { tokens } => tokens.saturating_mul(BYTES_PER_TOKEN),
            Self::Image { bytes } => *bytes,
            Self::Pointer { location } => location.len() as u64,
            Self::Unknown => 0,
        }
    }
}

impl<P: EstimateBytes> EstimateBytes for [P] {
    fn estimated_bytes(&self) -> u64 {
        self.iter().fold(0, |sum, part| sum.saturating_add(part.estimated_bytes()))
    }
}

impl<P: EstimateBytes, const N: usize> EstimateBytes for [P; N] {
    fn estimated_bytes(&self) -> u64 {
        self.as_slice().estimated_bytes()
    }
}

impl<P: EstimateBytes> EstimateBytes for Vec<P> {
    fn estimated_bytes(&self) -> u64 {
        self.as_slice().estimated_bytes()
    }
}

impl<T: EstimateBytes + ?Sized> EstimateBytes for &T {
    fn estimated_bytes(&self) -> u64 {
        T::estimated_bytes(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_part_has_an_estimate() {
        let table = [
            (Part::Text { tokens: 15 }, 150),
            (Part::Text { tokens: u64::MAX }, u64::MAX),
            (Part::Image { bytes: 4_096 }, 4_096),
            (Part::Pointer { location: "s3://bucket/key" }, 15),
            (Part::Unknown, 0),
        ];
        for (part, bytes) in table {
            assert_eq!(part.estimated_bytes(), bytes, "{part:?}");
        }
        let prompt = [Part::Text { tokens: 1 }, Part::Unknown, Part::Image { bytes: 7 }];
        assert_eq!(prompt.to_cost(), Cost::request().bytes(17));
        let parts: &Vec<Part<'_>> = &prompt.to_vec();
        assert_eq!(EstimateBytes::to_cost(&parts), prompt.to_cost());
    }
}
