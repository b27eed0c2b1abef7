//! The binary format of the scripts (`struct.pack`): little-endian doubles and length-prefixed texts.
//!
//! Lua's only numbers are doubles, which are exact up to 2⁵³. Times are split into seconds and microseconds,
//! so that the longest debt is exact too.

use std::time::Duration;

use smallvec::SmallVec;
use tidegate_core::bucket::Span;
use tidegate_core::time::Stamp;

use crate::error::StoreError;

/// Marks a limit that takes no part; amounts are smaller.
pub(super) const NONE: f64 = 9_007_199_254_740_992.0;

const SECOND: u64 = 1_000_000;

/// Most values fit inline, without an allocation.
pub(super) type Bytes = SmallVec<[u8; 96]>;

/// Encodes a value.
#[derive(Debug, Clone, Default)]
pub(super) struct Packer(pub(super) Bytes);

impl Packer {
    pub(super) fn byte(&mut self, byte: u8) -> &mut Self {
        self.0.push(byte);
        self
    }

    pub(super) fn word(&mut self, word: u32) -> &mut Self {
        self.bytes(&word.to_le_bytes())
    }

    pub(super) fn short(&mut self, short: u16) -> &mut Self {
        self.bytes(&short.to_le_bytes())
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn double(&mut self, double: f64) -> &mut Self {
        self.bytes(&double.to_le_bytes())
    }

    pub(super) fn number(&mut self, number: u64) -> &mut Self {
        self.double(to_double(number))
    }

    /// Seconds and microseconds.
    pub(super) fn span(&mut self, span: Duration) -> &mut Self {
        self.number(span.as_secs()).number(u64::from(span.subsec_micros()))
    }

    /// A length-prefixed text. No name has more than a thousand bytes.
    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        self.blob(text.as_bytes())
    }

    /// Length-prefixed bytes.
    pub(super) fn blob(&mut self, bytes: &[u8]) -> &mut Self {
        let length = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        self.short(length).bytes(&bytes[..usize::from(length)])
    }
}

/// Decodes a value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unpacker<'a> {
    rest: &'a [u8],
    /// The kind of value, for messages.
    what: &'static str,
}

impl<'a> Unpacker<'a> {
    pub(super) const fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { rest: bytes, what }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(super) fn corrupt(&self, why: &str) -> StoreError {
        StoreError::Corrupt { what: format!("{}: {why}", self.what) }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], StoreError> {
        let (head, rest) =
            self.rest.split_first_chunk::<N>().ok_or_else(|| self.corrupt("it ends too early"))?;
        self.rest = rest;
        Ok(*head)
    }

    pub(super) fn byte(&mut self) -> Result<u8, StoreError> {
        self.take().map(|[byte]| byte)
    }

    pub(super) fn short(&mut self) -> Result<u16, StoreError> {
        self.take().map(u16::from_le_bytes)
    }

    pub(super) fn word(&mut self) -> Result<u32, StoreError> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], StoreError> {
        self.take()
    }

    pub(super) fn double(&mut self) -> Result<f64, StoreError> {
        self.take().map(f64::from_le_bytes)
    }

    /// An unsigned integer.
    pub(super) fn number(&mut self) -> Result<u64, StoreError> {
        let double = self.double()?;
        whole(double).ok_or_else(|| self.corrupt(&format!("{double} is not an integer")))
    }

    /// A signed integer.
    pub(super) fn signed(&mut self) -> Result<i64, StoreError> {
        let double = self.double()?;
        let number = whole(double.abs()).and_then(|number| i64::try_from(number).ok());
        let number = number.ok_or_else(|| self.corrupt(&format!("{double} is not an integer")))?;
        Ok(if double < 0.0 { -number } else { number })
    }

    /// Units of a limit, or `None` if it takes no part.
    pub(super) fn units(&mut self) -> Result<Option<u64>, StoreError> {
        Ok(Some(self.number()?).filter(|number| to_double(*number) < NONE))
    }

    pub(super) fn stamp(&mut self) -> Result<Stamp, StoreError> {
        let (seconds, micros) = (self.number()?, self.number()?);
        Ok(Stamp::from_micros(micros_of(seconds, micros)))
    }

    /// The time at which a bucket is full.
    pub(super) fn full_at(&mut self) -> Result<Span, StoreError> {
        let (seconds, micros, part) = (self.number()?, self.number()?, self.number()?);
        Ok(Span { whole: micros_of(seconds, micros), part })
    }

    /// Reads `length` bytes.
    pub(super) fn skip(&mut self, length: usize) -> Result<&'a [u8], StoreError> {
        let (head, rest) =
            self.rest.split_at_checked(length).ok_or_else(|| self.corrupt("it ends too early"))?;
        self.rest = rest;
        Ok(head)
    }

    pub(super) fn text(&mut self) -> Result<&'a str, StoreError> {
        let length = usize::from(self.short()?);
        let text = self.skip(length)?;
        std::str::from_utf8(text).map_err(|_| self.corrupt("a name is not UTF-8"))
    }
}

fn micros_of(seconds: u64, micros: u64) -> u64 {
    seconds.saturating_mul(SECOND).saturating_add(micros)
}

/// Converts to Lua's number type. Amounts are below 2⁵³; larger times may lose their last digits.
#[expect(clippy::cast_precision_loss, reason = "numbers that count are below 2^53")]
pub(super) const fn to_double(number: u64) -> f64 {
    number as f64
}

/// The integer value of a double, if it is one.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked before")]
pub(super) fn whole(double: f64) -> Option<u64> {
    ((0.0..18_446_744_073_709_551_616.0).contains(&double) && double.fract() == 0.0).then_some(double as u64)
}

/// Converts a signed amount.
pub(super) fn to_signed_double(number: i64) -> f64 {
    let size = to_double(number.unsigned_abs());
    if number < 0 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_values_round_trip() {
        let mut packed = Packer::default();
        packed.byte(7).word(u32::MAX).number(1 << 40).text("größe").span(Duration::from_micros(3_000_007));
        packed.double(-12.0).double(NONE).double(0.5);
        let mut read = Unpacker::new(&packed.0, "a test");
        assert_eq!((read.byte().unwrap(), read.word().unwrap()), (7, u32::MAX));
        assert_eq!((read.number().unwrap(), read.text().unwrap()), (1 << 40, "größe"));
        assert_eq!(read.stamp().unwrap(), Stamp::from_micros(3_000_007));
        assert_eq!((read.signed().unwrap(), read.units().unwrap()), (-12, None));
        assert_eq!(
            read.number().unwrap_err().to_string(),
            "the store has corrupt data: a test: 0.5 is not an integer"
        );
        assert!(read.is_empty() && read.byte().is_err() && read.text().is_err());
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
            assert_eq!(whole(bad), None, "{bad}");
        }
    }
}
