//! Serves the scripted model: `scripted MODEL PORT`. MODEL is a file with a tokenizer that knows ChatML's markers; port 0
//! takes a free one. Requests need the key `secret`; `POST /shutdown` ends it.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use opencoti_http::{Listen, Server, ServerConfig};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, port] = &args[..] else { bail!("usage: scripted MODEL PORT") };
    let port: u16 = port.parse().with_context(|| format!("{port} is no port"))?;
    let engine = opencoti_tests::scripted::engine(&PathBuf::from(model))?;
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let listen = Listen::Tcp(([127, 0, 0, 1], port).into());
        let server =
            Server::bind(ServerConfig { listen, api_keys: vec!["secret".to_owned()], ..Default::default() }).await?;
        println!("listening on {}", server.local_addr().context("it listens on TCP")?);
        server.control().set_ready(engine, Arc::new(|| serde_json::json!([])));
        Ok(server.serve(std::future::pending()).await?)
    })
}
