//! Binds leases to tokens without a table: the name of a lease contains an HMAC over its id and the token's
//! id.
//!
//! Without the key the proof cannot be forged, so a leaked lease id is worthless to other tokens and ids
//! cannot be guessed.

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::Sha256;
use tidegate::store::Store;
use tidegate::{LeaseId, StoreError};
use tidegate_client::{EntityId, LeaseRef, RequestId, ResourceName};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{NewToken, TokenHash, TokenId, TokenScope, TokenScopes};

/// The token id under which a store keeps the key, in place of a secret's hash.
const STORED_ID: &str = ".lease-key";

/// The HMAC key of lease names. Servers over one store share it and keep it across restarts: with another
/// key, open leases cannot be continued and end at their deadline.
#[derive(Clone)]
pub struct LeaseKey(Hmac<Sha256>);

impl LeaseKey {
    /// Creates a key from bytes.
    pub fn new(bytes: &[u8; 32]) -> Self {
        // HMAC pads keys to the block size with zeros.
        let mut block = [0; 64];
        block[..32].copy_from_slice(bytes);
        Self(Hmac::new(&block.into()))
    }

    /// Creates a random key.
    pub fn random() -> Self {
        Self::new(&rand::random())
    }

    /// Loads the key from a store, or creates it there. All servers over the store share it.
    ///
    /// It is stored as the secret hash of a token with a [reserved](TokenId::is_reserved) id, which no secret
    /// matches. The key never appears in listings or in the audit log.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn of_store(store: &dyn Store, namespace: &Namespace) -> Result<Self, StoreError> {
        let id = TokenId::new(STORED_ID)?;
        if let Some((hash, _)) = store.token(&id).await? {
            return Ok(Self::new(hash.as_bytes()));
        }
        let hash = TokenHash::new(rand::random());
        let token = NewToken {
            id: id.clone(),
            name: "the key that leases are named with; nobody holds it".to_owned(),
            namespace: namespace.clone(),
            scopes: TokenScopes::new([TokenScope::Acquire]),
            entity: None,
            expires_at: None,
        };
        match store.create_token(&token, &hash, "tidegate").await {
            Ok(_) => Ok(Self::new(hash.as_bytes())),
            // Another server created it first.
            Err(error @ StoreError::Stale { .. }) => match store.token(&id).await? {
                Some((hash, _)) => Ok(Self::new(hash.as_bytes())),
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// Returns the name of a lease for the token that opened it.
    pub fn name(&self, lease: LeaseId, token: &TokenId) -> LeaseRef {
        let hash = self.hash(lease.number(), token).finalize().into_bytes();
        LeaseRef { id: lease.number(), proof: first_half(&hash.into()) }
    }

    /// Derives the request number of a request id, per token and subject. Other callers cannot guess it.
    pub(crate) fn number(
        &self,
        token: &TokenId,
        subject: (&EntityId, &ResourceName),
        id: &RequestId,
    ) -> u128 {
        let (entity, resource) = (subject.0.0.as_str(), subject.1.0.as_str());
        let texts = [token.as_str(), entity, resource, id.as_str()];
        let hash = texts.iter().fold(self.0.clone().chain_update(b"tidegate request"), |hash, text| {
            // Length prefixes keep the encoding injective.
            hash.chain_update((text.len() as u64).to_be_bytes()).chain_update(text)
        });
        first_half(&hash.finalize().into_bytes().into())
    }

    /// Returns the lease if it was opened with this token.
    pub fn open(&self, name: &LeaseRef, token: &TokenId) -> Option<LeaseId> {
        let proof = name.proof.to_be_bytes();
        // Compared in constant time.
        self.hash(name.id, token).verify_truncated_left(&proof).ok()?;
        Some(LeaseId::from_number(name.id))
    }

    fn hash(&self, lease: u128, token: &TokenId) -> Hmac<Sha256> {
        // The lease id has a fixed length, which keeps the encoding injective.
        self.0
            .clone()
            .chain_update(b"tidegate lease")
            .chain_update(lease.to_be_bytes())
            .chain_update(token.as_str())
    }
}

fn first_half(hash: &[u8; 32]) -> u128 {
    hash[..16].iter().fold(0, |number, byte| (number << 8) | u128::from(*byte))
}

impl fmt::Debug for LeaseKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LeaseKey(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_name_opens_only_with_its_token_and_key() {
        let (key, lease) = (LeaseKey::new(&[7; 32]), LeaseId::new(5, 9));
        let (ci, other) = (TokenId::new("ci").unwrap(), TokenId::new("other").unwrap());
        let name = key.name(lease, &ci);
        assert_eq!(key.open(&name, &ci), Some(lease));
        assert_eq!(LeaseKey::new(&[7; 32]).open(&name, &ci), Some(lease), "after a restart");
        assert_eq!(key.open(&name, &other), None);
        assert_eq!(LeaseKey::random().open(&name, &ci), None);
        for bit in 0..128 {
            let forged = LeaseRef { proof: name.proof ^ (1 << bit), ..name.clone() };
            let moved = LeaseRef { id: name.id ^ (1 << bit), ..name.clone() };
            assert_eq!((key.open(&forged, &ci), key.open(&moved, &ci)), (None, None));
        }
        assert_eq!(format!("{key:?}"), "LeaseKey(…)");
    }

    #[test]
    fn request_number_is_unique_per_token_and_subject() {
        let key = LeaseKey::new(&[7; 32]);
        let number = |token: &str, entity: &str, resource: &str, id: &str| {
            let subject = (&entity.parse().unwrap(), &resource.parse().unwrap());
            key.number(&TokenId::new(token).unwrap(), subject, &id.parse().unwrap())
        };
        let one = number("ci", "acme", "gpt", "0123456789abcdef");
        assert_eq!(number("ci", "acme", "gpt", "0123456789abcdef"), one);
        let others = [
            number("cd", "acme", "gpt", "0123456789abcdef"),
            number("ci", "acm", "egpt", "0123456789abcdef"),
            number("ci", "acme", "gpu", "0123456789abcdef"),
            number("ci", "acme", "gpt", "0123456789abcdeF"),
        ];
        assert!(!others.contains(&one));
    }

    #[tokio::test]
    async fn servers_over_one_store_share_lease_key() {
        let (store, namespace) = (tidegate::Memory::new(), Namespace::new("default").unwrap());
        let one = LeaseKey::of_store(&store, &namespace).await.unwrap();
        let other = LeaseKey::of_store(&store, &namespace).await.unwrap();
        let ci = TokenId::new("ci").unwrap();
        assert!(other.open(&one.name(LeaseId::new(5, 9), &ci), &ci).is_some());
    }
}
