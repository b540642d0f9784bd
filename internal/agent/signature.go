package agent

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Operations that a signature allows.
const (
	opRead  = "read"
	opWrite = "write"
)

// signature returns the signature of a file operation. The expiration is a Unix time in
// seconds as text, empty for none.
func signature(path, op, user, token, expiration string) string {
	text := path + ":" + op + ":" + user + ":" + token
	if expiration != "" {
		text += ":" + expiration
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// checkFileAccess returns why a request to /files is refused, nil when it is not: it
// needs the access token or a signature of exactly this operation.
func (id *identity) checkFileAccess(r *http.Request, q url.Values, op string) error {
	token := r.Header.Get(tokenHeader)
	if id.token == "" || token != "" && id.accepts(token) {
		return nil
	}
	if token != "" {
		return errors.New("access token present in header but does not match")
	}
	given, expiration := q.Get("signature"), q.Get("signature_expiration")
	if given == "" {
		return errors.New("missing signature query parameter")
	}
	want := signature(q.Get("path"), op, q.Get("username"), id.token, expiration)
	if subtle.ConstantTimeCompare([]byte(given), []byte(want)) != 1 {
		return errors.New("invalid signature")
	}
	if expiration == "" {
		return nil
	}
	at, err := strconv.ParseInt(expiration, 10, 64)
	if err != nil {
		return errors.New("invalid signature")
	}
	if time.Now().Unix() > at {
		return errors.New("signature is already expired")
	}
	return nil
}
