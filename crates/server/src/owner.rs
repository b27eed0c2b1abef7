//! Whose a lease is, without a list of leases: its id carries a proof for the token that opened it.
//!
//! The proof is a keyed hash of the lease's id and the token's id. Nobody without the key can make one, so that a lease's
//! id that leaks is worth nothing to another token, and no id can be guessed.

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::Sha256;
use tidegate::store::Store;
use tidegate::{LeaseId, StoreError};
use tidegate_client::{EntityId, LeaseRef, RequestId, ResourceName};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{NewToken, TokenHash, TokenId, TokenScope, TokenScopes};

/// The id under which a store keeps the key: as the hash of a token whose secret nobody has.
const KEPT_AS: &str = ".lease-key";

/// The key that proofs are made with. Servers over one store share it, and so does a server with itself after a restart: with
/// another one, leases that are open cannot be gone on with, and end by their deadline.
#[derive(Clone)]
pub struct LeaseKey(Hmac<Sha256>);

impl LeaseKey {
    /// The key of these bytes.
    pub fn new(bytes: &[u8; 32]) -> Self {
        // A key is as long as a block of the hash, and zeros behind it change nothing.
        let mut block = [0; 64];
        block[..32].copy_from_slice(bytes);
        Self(Hmac::new(&block.into()))
    }

    /// A key that nobody has.
    pub fn random() -> Self {
        Self::new(&rand::random())
    }

    /// The key that a store keeps, made now if there is none: the same for all servers over it, and after a restart.
    ///
    /// It stands among the tokens, as the hash of one that nobody can have, under an id that is
    /// [reserved](TokenId::is_reserved): the key itself is in no listing and in no audit entry.
    ///
    /// # Errors
    /// What the store says.
    pub async fn of_store(store: &dyn Store, namespace: &Namespace) -> Result<Self, StoreError> {
        let id = TokenId::new(KEPT_AS)?;
        if let Some((hash, _)) = store.token(&id).await? {
            return Ok(Self::new(hash.as_bytes()));
        }
        let hash = TokenHash::new(rand::random());
        let token = NewToken {
            id: id.clone(),
            name: "the key that leases are named with; nobody holds it".to_owned(),
            namespace: namespace.clone(),
            scopes: TokenScopes::new([TokenScope::Acquire]),
            expires_at: None,
        };
        match store.create_token(&token, &hash, "tidegate").await {
            Ok(_) => Ok(Self::new(hash.as_bytes())),
            // Another server was faster.
            Err(error @ StoreError::Stale { .. }) => match store.token(&id).await? {
                Some((hash, _)) => Ok(Self::new(hash.as_bytes())),
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// How the holder of a token names a lease that was opened with it.
    pub fn name(&self, lease: LeaseId, token: &TokenId) -> LeaseRef {
        let hash = self.hash(lease.number(), token).finalize().into_bytes();
        LeaseRef { id: lease.number(), proof: first_half(&hash.into()) }
    }

    /// The number that stands for what the holder of a token calls a request for a subject: the same for the same, and
    /// for nobody else to guess.
    pub(crate) fn number(&self, token: &TokenId, ask: (&EntityId, &ResourceName), id: &RequestId) -> u128 {
        let (entity, resource) = (ask.0.0.as_str(), ask.1.0.as_str());
        let texts = [token.as_str(), entity, resource, id.as_str()];
        let hash = texts.iter().fold(self.0.clone().chain_update(b"tidegate request"), |hash, text| {
            // Each with its length before it, so that no two lists are the same bytes.
            hash.chain_update((text.len() as u64).to_be_bytes()).chain_update(text)
        });
        first_half(&hash.finalize().into_bytes().into())
    }

    /// The lease, if it was opened with this token.
    pub fn open(&self, named: &LeaseRef, token: &TokenId) -> Option<LeaseId> {
        let proof = named.proof.to_be_bytes();
        // Compared in constant time.
        self.hash(named.id, token).verify_truncated_left(&proof).ok()?;
        Some(LeaseId::from_number(named.id))
    }

    fn hash(&self, lease: u128, token: &TokenId) -> Hmac<Sha256> {
        // The lease's id is of one length, so that no two pairs are the same text.
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
    fn a_lease_opens_for_its_token_by_its_key_and_for_nothing_else() {
        let (key, lease) = (LeaseKey::new(&[7; 32]), LeaseId::new(5, 9));
        let (ci, other) = (TokenId::new("ci").unwrap(), TokenId::new("other").unwrap());
        let named = key.name(lease, &ci);
        assert_eq!(key.open(&named, &ci), Some(lease));
        assert_eq!(LeaseKey::new(&[7; 32]).open(&named, &ci), Some(lease), "after a restart");
        assert_eq!(key.open(&named, &other), None);
        assert_eq!(LeaseKey::random().open(&named, &ci), None);
        for bit in 0..128 {
            let forged = LeaseRef { proof: named.proof ^ (1 << bit), ..named.clone() };
            let moved = LeaseRef { id: named.id ^ (1 << bit), ..named.clone() };
            assert_eq!((key.open(&forged, &ci), key.open(&moved, &ci)), (None, None));
        }
        assert_eq!(format!("{key:?}"), "LeaseKey(…)");
    }

    #[test]
    fn an_id_stands_for_one_request_of_one_token_for_one_subject() {
        let key = LeaseKey::new(&[7; 32]);
        let number = |token: &str, entity: &str, resource: &str, id: &str| {
            let ask = (&entity.parse().unwrap(), &resource.parse().unwrap());
            key.number(&TokenId::new(token).unwrap(), ask, &id.parse().unwrap())
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
    async fn servers_over_one_store_have_one_key() {
        let (store, namespace) = (tidegate::Memory::new(), Namespace::new("default").unwrap());
        let one = LeaseKey::of_store(&store, &namespace).await.unwrap();
        let other = LeaseKey::of_store(&store, &namespace).await.unwrap();
        let ci = TokenId::new("ci").unwrap();
        assert!(other.open(&one.name(LeaseId::new(5, 9), &ci), &ci).is_some());
    }
}
